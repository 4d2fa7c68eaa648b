"""E4M3 weights with block scales, and E4M3 activations with one power-of-two scale per token per 128 columns."""

from __future__ import annotations

import torch
from torch import Tensor

from foldmoe.formats import blocks, e8m0
from foldmoe.formats.tensor import Format, QuantizedTensor

MAX = 448.0
"""Largest E4M3 magnitude (byte 0x7E)."""

AMAX_FLOOR = 1e-4
"""Smallest amax an activation group is scaled by, as DeepSeek's kernels do: an all-zero token stays exactly zero."""

ACTIVATION_GROUP = 128
_NAN_BYTES = (0x7F, 0xFF)


def nan_mask(values: Tensor) -> Tensor:
    """True where an E4M3 byte is NaN (0x7F or 0xFF)."""
    return (values.view(torch.uint8) & 0x7F) == _NAN_BYTES[0]


def cast(values: Tensor) -> Tensor:
    """Numbers to E4M3, saturating at 448."""
    return values.clamp(-MAX, MAX).to(torch.float8_e4m3fn)


def quantize_block(
    weight: Tensor, format: Format = Format.FP8_128x128, *, e8m0_scales: bool | None = None
) -> QuantizedTensor:
    """Quantise ``[..., N, K]`` to E4M3 with one scale = amax / 448 a block.

    Args:
        weight: numbers of any floating dtype.
        format: FP8_128x128, FP8_32x32 or MXFP8.
        e8m0_scales: round scales up to powers of two and store them as E8M0. Default: True for MXFP8 and FP8_32x32
            (as V4.1 stores them), False for FP8_128x128 (as V3 and GLM do).

    Raises:
        ValueError: if ``format`` is not an FP8 one, or the weight holds NaN or Inf.
    """
    if not format.fp8:
        raise ValueError(f"quantize_block writes FP8 formats, not {format.value}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{format.value} weights hold neither NaN nor Inf; the weight to quantise does")
    rows, columns = weight.shape[-2:]
    amax = _block_amax(weight.abs().to(torch.float32), format.block)
    scale = amax / MAX
    scale = torch.where(scale > 0, scale, torch.ones_like(amax))  # amax 0, or so small that amax / 448 is
    stored = scale
    if e8m0_scales if e8m0_scales is not None else format is not Format.FP8_128x128:
        stored = e8m0.encode_ceil(scale).view(torch.float8_e8m0fnu)
        scale = e8m0.decode(stored)
    values = cast(weight.to(torch.float32) / blocks.expand(scale, rows, columns, format.block))
    return QuantizedTensor(values, stored, format=format)


def dequantize_block(tensor: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inverse of :func:`quantize_block`, up to its rounding: ``[..., N, K]`` numbers."""
    return tensor.dequantize(dtype)


def _block_amax(magnitude: Tensor, block: blocks.Block) -> Tensor:
    """Maximum of every block of ``[..., N, K]``; a short last block counts its own elements alone."""
    across = blocks.groups(magnitude, block[1]).amax(dim=-1)
    return blocks.groups(across.transpose(-1, -2), block[0]).amax(dim=-1).transpose(-1, -2)


def quantize_activations(x: Tensor, group: int | None = ACTIVATION_GROUP) -> tuple[Tensor, Tensor]:
    """Activations ``[M, K]`` to E4M3 ``[M, K]`` and float32 scales ``[M, ceil(K/group)]`` (``[M, 1]`` for None).

    scale = 2 ** ceil(log2(amax / 448)), amax floored at 1e-4 (DeepSeek-V3's and V4's own activation quantisation).
    A NaN stays one and counts for nothing in its group's scale.
    """
    columns = x.shape[-1]
    group = group or max(columns, 1)
    wide = x.to(torch.float32)
    amax = _block_amax(wide.abs().nan_to_num(0.0), (1, group)).clamp_min(AMAX_FLOOR)
    scale = e8m0.decode(e8m0.encode_ceil(amax / MAX))
    spread = blocks.expand(scale, x.shape[-2], columns, (1, group))
    return cast(wide / spread), scale


def dequantize_activations(
    values: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, *, group: int = ACTIVATION_GROUP
) -> Tensor:
    """Inverse of :func:`quantize_activations`, up to its rounding.

    One scale a row is read as such, whatever the group.

    Raises:
        ValueError: if there is neither one scale a row nor one a group.
    """
    rows, columns = values.shape[-2:]
    if scale.shape[-1] == 1:
        group = max(columns, 1)
    elif scale.shape[-1] != -(-columns // group):
        raise ValueError(
            f"{columns} columns in groups of {group} need {-(-columns // group)} scales, found {scale.shape[-1]}"
        )
    return values.to(dtype) * blocks.expand(scale.to(dtype), rows, columns, (1, group))
