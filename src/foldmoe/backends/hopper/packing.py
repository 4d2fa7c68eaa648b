"""A layer's stored weights to :class:`Weights`: everything is checked before anything is written over."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

import torch

from foldmoe.backends.hopper import pack, workspace
from foldmoe.backends.hopper.batch import Weights
from foldmoe.backends.hopper.heuristics import Geometry
from foldmoe.backends.hopper.pack_bf16 import PackedBf16, check_bf16, pack_bf16
from foldmoe.backends.hopper.pack_fp8 import PackedFp8, check_fp8_block, pack_fp8_block, scale_groups
from foldmoe.formats import Format

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.backends.hopper.pack import PackedRouted
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
    _check(routed, "routed")
    shared_up: PackedFp8 | PackedBf16 | None = None
    shared_down: PackedFp8 | PackedBf16 | None = None
    if shared is not None:
        _check(shared, "shared")
        shared_up, shared_down = _pack_whole(shared, "shared", consume=False)
    up: PackedRouted | PackedFp8 | PackedBf16
    down: PackedRouted | PackedFp8 | PackedBf16
    if routed.format is not Format.MXFP4:
        up, down = _pack_whole(routed, "routed", consume=consume)
    else:
        up = pack.pack_mxfp4(*_bytes(routed.gate_up), True, consume=consume, checked=True)
        down = pack.pack_mxfp4(*_bytes(routed.down), False, consume=consume, checked=True)
    sizes = geometry(up, down, shared_up, shared_down, activation, shared_activation, activations)
    workspace.stall_report(routed.device)  # host memory is never taken during a graph capture
    strays = torch.zeros(1, dtype=torch.int64, device=routed.device)
    gpu = torch.cuda.get_device_name(routed.device) if routed.device.type == "cuda" else ""
    powers = shared is None or (shared.gate_up.e8m0_scales and shared.down.e8m0_scales)
    return Weights(up, down, shared_up, shared_down, sizes, strays, gpu=gpu, powers=powers)


def geometry(
    up: PackedRouted | PackedFp8 | PackedBf16,
    down: PackedRouted | PackedFp8 | PackedBf16,
    shared_up: PackedFp8 | PackedBf16 | None,
    shared_down: PackedFp8 | PackedBf16 | None,
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
        shared_up.groups if isinstance(shared_up, PackedFp8) else 0,
        _limit(activation),
        _limit(shared_activation),
        activations == "fp8_token",
        "fp8" if isinstance(up, PackedFp8) else "bf16" if isinstance(up, PackedBf16) else "mxfp4",
        up.groups if isinstance(up, PackedFp8) else 0,
    )


def _check(weights: ExpertWeights, which: str) -> None:
    for role, tensor in (("gate_up", weights.gate_up), ("down", weights.down)):
        if weights.format.fp8:
            check_fp8_block(tensor.scale_values(), tensor.block, name=f"{which} {role}")
        elif weights.format is Format.BF16:
            check_bf16(tensor.values, name=f"{which} {role}")
        else:
            pack.check_mxfp4(*_bytes(tensor), name=f"{which} {role}")


def _bytes(tensor: QuantizedTensor) -> tuple[Tensor, Tensor]:
    assert tensor.scales is not None
    return tensor.values.view(torch.uint8), tensor.scales.view(torch.uint8)


def _limit(activation: Activation) -> float:
    return inf if activation.limit is None else activation.limit


def _pack_whole(
    weights: ExpertWeights, which: str, *, consume: bool
) -> tuple[PackedFp8, PackedFp8] | tuple[PackedBf16, PackedBf16]:
    """Both projections of one set in FP8 or bf16."""
    if weights.format is Format.BF16:
        return (
            pack_bf16(weights.gate_up.values, True, consume=consume, name=f"{which} gate_up"),
            pack_bf16(weights.down.values, False, consume=consume, name=f"{which} down"),
        )
    groups = scale_groups(weights.gate_up.block[1], weights.down.block[1])
    up, down = (
        pack_fp8_block(
            tensor.values,
            tensor.scale_values(),
            role == "gate_up",
            block=tensor.block,
            stored_scales=tensor.scales,
            groups=groups,
            consume=consume,
            name=f"{which} {role}",
        )
        for role, tensor in (("gate_up", weights.gate_up), ("down", weights.down))
    )
    return up, down
