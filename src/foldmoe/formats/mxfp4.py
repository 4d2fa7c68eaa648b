"""MXFP4: E2M1 codes with one E8M0 scale per 32 columns (OCP Microscaling Formats v1.0)."""

from __future__ import annotations

import torch
from torch import Tensor

from foldmoe.formats import blocks, e2m1, e8m0
from foldmoe.formats.tensor import Format, QuantizedTensor

GROUP = 32


def quantize(weight: Tensor) -> QuantizedTensor:
    """Quantise ``[..., N, K]`` to MXFP4, each block with the better of two exponents.

    The candidates are the OCP rule, floor(log2(amax)) - 2, whose top values saturate, and the next exponent up, which
    never saturates. The one with the smaller squared error wins, so no block is worse than under either rule.

    Raises:
        ValueError: if K is odd, or the weight holds NaN or Inf.
    """
    columns = weight.shape[-1]
    if columns % 2:
        raise ValueError(f"MXFP4 packs two columns a byte: K must be even, found {columns}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("MXFP4 holds neither NaN nor Inf; the weight to quantise does")
    wide = blocks.groups(weight.to(torch.float32), GROUP)
    amax = wide.abs().amax(dim=-1)
    low = torch.where(amax > 0, torch.frexp(amax).exponent - 3, torch.zeros_like(amax, dtype=torch.int32))
    candidates = [_try_exponent(wide, (low + step).clamp(-127, 127)) for step in (0, 1)]
    (codes0, error0, exp0), (codes1, error1, exp1) = candidates
    better = error1 < error0
    codes = torch.where(better[..., None], codes1, codes0).flatten(-2)[..., :columns]
    exponent = torch.where(better, exp1, exp0)
    scales = (exponent + e8m0.BIAS).to(torch.uint8).view(torch.float8_e8m0fnu)
    return QuantizedTensor(e2m1.pack(codes), scales, format=Format.MXFP4)


def _try_exponent(groups: Tensor, exponent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = torch.exp2(exponent.to(torch.float64))[..., None]
    scaled = groups.to(torch.float64) / scale
    codes = e2m1.encode(scaled)
    error = ((e2m1.decode(codes, torch.float64) - scaled) * scale).square().sum(dim=-1)
    return codes, error, exponent


def dequantize(tensor: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers ``[..., N, K]``: code * 2 ** (byte - 127)."""
    return tensor.dequantize(dtype)
