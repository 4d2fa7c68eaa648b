"""A packed layer of meta tensors: what it launches can be compiled with no weights and no GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foldmoe.backends.hopper.batch import Weights
from foldmoe.backends.hopper.pack import PackedRouted, padded, row_blocks
from foldmoe.backends.hopper.pack_bf16 import PackedBf16
from foldmoe.backends.hopper.pack_fp8 import PackedFp8, scale_groups
from foldmoe.backends.hopper.packing import geometry
from foldmoe.formats import Format

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.moe.spec import ActivationPrecision, ExpertSpec, LayerSpec


def outline(spec: LayerSpec, activations: ActivationPrecision, gpu: str) -> Weights:
    """``spec``, one rank's part, as :func:`foldmoe.backends.hopper.packing.pack_layer` would pack it on ``gpu``."""
    up, down = _set(spec.routed, spec.hidden)
    shared_up, shared_down = (None, None) if spec.shared is None else _whole(spec.shared, spec.hidden)
    sizes = geometry(up, down, shared_up, shared_down, spec.activation, spec.shared_activation, activations)
    powers = spec.shared is None or spec.shared.e8m0_scales
    return Weights(up, down, shared_up, shared_down, sizes, _meta((1,), torch.int64), gpu=gpu, powers=powers)


def _set(
    spec: ExpertSpec, hidden: int
) -> tuple[PackedRouted, PackedRouted] | tuple[PackedFp8, PackedFp8] | tuple[PackedBf16, PackedBf16]:
    if spec.format is not Format.MXFP4:
        return _whole(spec, hidden)
    return _mxfp4(spec.count, 2 * spec.width, hidden, True), _mxfp4(spec.count, hidden, spec.width, False)


def _whole(spec: ExpertSpec, hidden: int) -> tuple[PackedFp8, PackedFp8] | tuple[PackedBf16, PackedBf16]:
    if spec.format is Format.BF16:
        return _bf16(spec.count, 2 * spec.width, hidden, True), _bf16(spec.count, hidden, spec.width, False)
    return _fp8(spec, 2 * spec.width, hidden, True), _fp8(spec, hidden, spec.width, False)


def _bf16(experts: int, rows: int, columns: int, interleaved: bool) -> PackedBf16:
    values = _meta((experts * row_blocks(rows) * 256 * padded(columns) // 64, 64), torch.bfloat16)
    return PackedBf16(values, (experts, rows, columns), interleaved)


def _mxfp4(experts: int, rows: int, columns: int, interleaved: bool) -> PackedRouted:
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


def _fp8(spec: ExpertSpec, rows: int, columns: int, interleaved: bool) -> PackedFp8:
    units = spec.count * row_blocks(rows) * padded(columns) // 128 * 4
    groups = scale_groups(spec.block[1], spec.format.block[1])
    return PackedFp8(
        _meta((units * 64, 128), torch.float8_e4m3fn),
        _meta((units * groups, 8), torch.float32),
        _meta((0,), torch.float32),
        (spec.count, rows, columns),
        spec.block,
        groups,
        interleaved,
    )


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
