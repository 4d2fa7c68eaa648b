"""NVFP4: E2M1 codes, an E4M3 scale per 16 columns and one float32 scale per matrix."""

from __future__ import annotations

import torch
from torch import Tensor

from foldmoe.formats import blocks, e2m1, fp8
from foldmoe.formats.tensor import Format, QuantizedTensor

GROUP = 16


def quantize(weight: Tensor) -> QuantizedTensor:
    """Quantise ``[..., N, K]``: global = amax / (6 * 448) a matrix, block scale = E4M3(block amax / 6 / global).

    Source of the two-level rule: NVIDIA TensorRT Model Optimizer's NVFP4 recipe.

    Raises:
        ValueError: if K is odd, or the weight holds NaN or Inf.
    """
    columns = weight.shape[-1]
    if columns % 2:
        raise ValueError(f"NVFP4 packs two columns a byte: K must be even, found {columns}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("NVFP4 holds neither NaN nor Inf; the weight to quantise does")
    wide = blocks.groups(weight.to(torch.float32), GROUP)
    amax = wide.abs().amax(dim=(-3, -2, -1))
    global_scale = amax / (e2m1.MAX * fp8.MAX)
    global_scale = torch.where(global_scale > 0, global_scale, torch.ones_like(amax))
    scales = fp8.cast(wide.abs().amax(dim=-1) / e2m1.MAX / global_scale[..., None, None])
    step = scales.to(torch.float32) * global_scale[..., None, None]
    codes = e2m1.encode(wide / torch.where(step > 0, step, torch.ones_like(step))[..., None])
    return QuantizedTensor(
        e2m1.pack(codes.flatten(-2)[..., :columns]), scales, format=Format.NVFP4, global_scale=global_scale
    )


def dequantize(tensor: QuantizedTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers ``[..., N, K]``: code * block scale * global scale."""
    return tensor.dequantize(dtype)
