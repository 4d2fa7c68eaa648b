"""A packed layer of meta tensors: what it launches can be compiled with no weights and no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foldmoe.backends.triton.config import MACHINES, Machine
from foldmoe.backends.triton.layer import TritonLayer, machine_of
from foldmoe.backends.triton.layout import pack
from foldmoe.formats import Format, QuantizedTensor, blocks
from foldmoe.moe import ExpertWeights

if TYPE_CHECKING:
    from foldmoe.formats.blocks import Block
    from foldmoe.moe.spec import ActivationPrecision, ExpertSpec, LayerSpec
    from foldmoe.planner.devices import Device

_FLOAT = {2: torch.bfloat16, 4: torch.float32}


def outline(spec: LayerSpec, activations: ActivationPrecision, device: Device) -> TritonLayer:
    """``spec``, one rank's part, as :class:`TritonLayer` would hold it on ``device``.

    Tensors are taken to be contiguous, as in a checkpoint, and E8M0 scales to be at most 2, as trained weights' are;
    others run other variants of the kernels.

    Raises:
        ValueError: an architecture whose shared memory is not known here, and which is not the present GPU's.
    """
    return TritonLayer(
        pack(_experts(spec.routed, spec.hidden), "routed"),
        pack(_experts(spec.shared, spec.hidden), "shared") if spec.shared else None,
        spec.activation,
        spec.shared_activation,
        activations,
        machine=_machine(device),
    )


def _machine(device: Device) -> Machine:
    if torch.cuda.is_available():
        facts = torch.cuda.get_device_properties(torch.cuda.current_device())
        if facts.name == device.name:
            return machine_of(torch.device("cuda", torch.cuda.current_device()))
    if device.arch in MACHINES:
        return MACHINES[device.arch]
    raise ValueError(
        f"kernels for {device.name} ({device.arch}) can only be compiled on it: its shared memory is not known here; "
        f"known are {', '.join(MACHINES)}"
    )


def _experts(spec: ExpertSpec, hidden: int) -> ExpertWeights:
    rows, columns = spec.block
    up = _matrix(spec, 2 * spec.width, hidden, (rows, spec.format.block[1]))
    return ExpertWeights(up, _matrix(spec, hidden, spec.width, (spec.format.block[0], columns)))


def _matrix(spec: ExpertSpec, rows: int, columns: int, block: Block) -> QuantizedTensor:
    if spec.format is Format.BF16:
        values = torch.empty(spec.count, rows, columns, dtype=_FLOAT[spec.float_bytes], device="meta")
        return QuantizedTensor(values, format=spec.format)
    packed = spec.format.packed
    kind = torch.uint8 if packed else torch.float8_e4m3fn
    values = torch.empty(spec.count, rows, columns // 2 if packed else columns, dtype=kind, device="meta")
    kind = torch.uint8 if spec.e8m0_scales else _FLOAT[spec.float_bytes]
    shape = (spec.count, *blocks.scale_shape(rows, columns, block))
    scales = torch.empty(shape, dtype=kind, device="meta")
    return QuantizedTensor(values, scales, format=spec.format, block=block)
