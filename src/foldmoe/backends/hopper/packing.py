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


def pack_layer(
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    activation: Activation,
    shared_activation: Activation,
    *,
    consume: bool = False,
) -> Weights:
    """See :meth:`foldmoe.backends.hopper.backend.HopperBackend.pack`."""
    stored = {"gate_up": routed.gate_up, "down": routed.down}
    for name, tensor in stored.items():
        pack.check_mxfp4(*_bytes(tensor), name=f"routed {name}")
    shared_up = shared_down = None
    groups = 0
    if shared is not None:
        groups = 1 if shared.gate_up.block[1] % 128 == 0 and shared.down.block[1] % 128 == 0 else 4
        shared_up = _pack_shared(shared.gate_up, True, groups)
        shared_down = _pack_shared(shared.down, False, groups)
    up = pack.pack_mxfp4(*_bytes(routed.gate_up), True, consume=consume, checked=True)
    down = pack.pack_mxfp4(*_bytes(routed.down), False, consume=consume, checked=True)
    geometry = Geometry(
        routed.hidden,
        up.blocks,
        down.blocks,
        shared_up.blocks if shared_up else 0,
        shared_down.blocks if shared_down else 0,
        down.steps,
        shared_down.steps if shared_down else 0,
        groups,
        _limit(activation),
        _limit(shared_activation),
    )
    workspace.stall_report(routed.device)  # host memory is never taken during a graph capture
    strays = torch.zeros(1, dtype=torch.int64, device=routed.device)
    return Weights(up, down, shared_up, shared_down, geometry, strays)


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
