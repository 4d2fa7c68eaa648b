"""A layer's stored weights to :class:`Weights`: everything is checked before anything is written over."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch

from foldmoe.backends.hopper import pack, pack_shared, workspace
from foldmoe.backends.hopper.batch import Weights
from foldmoe.backends.hopper.heuristics import Geometry

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.formats import QuantizedTensor
    from foldmoe.moe import Activation, ExpertWeights
    from foldmoe.moe.spec import ActivationPrecision


def pack_layer(
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    activation: Activation,
    shared_activation: Activation,
    *,
    activations: ActivationPrecision = "fp8",
    consume: bool = False,
) -> Weights:
    """See :meth:`foldmoe.backends.hopper.backend.HopperBackend.pack`."""
    stored = {"gate_up": routed.gate_up, "down": routed.down}
    for name, tensor in stored.items():
        pack.check_mxfp4(*_bytes(tensor), name=f"routed {name}")
    shared_up = shared_down = None
    if shared is not None:
        groups = scale_groups(shared.gate_up.block[1], shared.down.block[1])
        shared_up = _pack_shared(shared.gate_up, True, groups)
        shared_down = _pack_shared(shared.down, False, groups)
    up = pack.pack_mxfp4(*_bytes(routed.gate_up), True, consume=consume, checked=True)
    down = pack.pack_mxfp4(*_bytes(routed.down), False, consume=consume, checked=True)
    sizes = geometry(up, down, shared_up, shared_down, activation, shared_activation, activations)
    workspace.stall_report(routed.device)  # host memory is never taken during a graph capture
    strays = torch.zeros(1, dtype=torch.int64, device=routed.device)
    gpu = torch.cuda.get_device_name(routed.device) if routed.device.type == "cuda" else ""
    return Weights(up, down, shared_up, shared_down, sizes, strays, gpu=gpu)


def geometry(
    up: pack.PackedRouted,
    down: pack.PackedRouted,
    shared_up: pack_shared.PackedShared | None,
    shared_down: pack_shared.PackedShared | None,
    activation: Activation,
    shared_activation: Activation,
    activations: ActivationPrecision,
) -> Geometry:
    """The packed layer's sizes."""
    return Geometry(
        up.shape[2],
        up.blocks,
        down.blocks,
        shared_up.blocks if shared_up else 0,
        shared_down.blocks if shared_down else 0,
        down.steps,
        shared_down.steps if shared_down else 0,
        shared_up.groups if shared_up else 0,
        _limit(activation),
        _limit(shared_activation),
        activations == "fp8_token",
    )


def scale_groups(*columns: int) -> int:
    """Shared scales a step of 128 columns, where one scale spans ``columns`` in the up and the down projection."""
    return 1 if all(span % 128 == 0 for span in columns) else 4


def _bytes(tensor: QuantizedTensor) -> tuple[Tensor, Tensor]:
    assert tensor.scales is not None
    return tensor.values.view(torch.uint8), tensor.scales.view(torch.uint8)


def _limit(activation: Activation) -> float:
    return inf if activation.limit is None else activation.limit


def _pack_shared(tensor: QuantizedTensor, gate_up: bool, groups: int) -> pack_shared.PackedShared:
    return pack_shared.pack_fp8_block(
        tensor.values[0],
        tensor.scale_values()[0],
        gate_up,
        block=tensor.block,
        stored_scales=tensor.scales,
        groups=groups,
        name=f"shared {'gate_up' if gate_up else 'down'}",
    )
