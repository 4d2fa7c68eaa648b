"""A packed layer of meta tensors: what it launches can be compiled with no weights and no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foldmoe.backends.hopper.batch import Weights
from foldmoe.backends.hopper.pack import PackedRouted, padded, row_blocks
from foldmoe.backends.hopper.pack_shared import PackedShared
from foldmoe.backends.hopper.packing import geometry, scale_groups

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.moe.spec import ActivationPrecision, ExpertSpec, LayerSpec


def outline(spec: LayerSpec, activations: ActivationPrecision, gpu: str) -> Weights:
    """``spec``, one rank's part, as :func:`foldmoe.backends.hopper.packing.pack_layer` would pack it on ``gpu``."""
    hidden, width = spec.hidden, spec.routed.width
    up = _routed(spec.routed.count, 2 * width, hidden, True)
    down = _routed(spec.routed.count, hidden, width, False)
    shared_up = shared_down = None
    if spec.shared is not None:
        shared_up = _shared(spec.shared, 2 * spec.shared.width, hidden, True)
        shared_down = _shared(spec.shared, hidden, spec.shared.width, False)
    sizes = geometry(up, down, shared_up, shared_down, spec.activation, spec.shared_activation, activations)
    return Weights(up, down, shared_up, shared_down, sizes, _meta((1,), torch.int64), gpu=gpu)


def _routed(experts: int, rows: int, columns: int, interleaved: bool) -> PackedRouted:
    units = experts * row_blocks(rows) * padded(columns) // 128 * 4
    nothing = _meta((0,), torch.int64)
    return PackedRouted(
        _meta((units * 16, 256), torch.uint8),
        _meta((units, 256), torch.uint8),
        _meta((experts * row_blocks(rows) * 256,), torch.float32),
        nothing,
        nothing,
        (experts, rows, columns),
        interleaved,
    )


def _shared(spec: ExpertSpec, rows: int, columns: int, interleaved: bool) -> PackedShared:
    units, groups = row_blocks(rows) * padded(columns) // 128 * 4, scale_groups(spec.block[1], spec.format.block[1])
    return PackedShared(
        _meta((units * 64, 128), torch.float8_e4m3fn),
        _meta((units * groups, 8), torch.float32),
        _meta((0,), torch.float32),
        (rows, columns),
        spec.block,
        groups,
        interleaved,
    )


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
