"""Stored weights as torch's scaled and plain products take them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from foldmoe.formats import fp8

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.formats import QuantizedTensor


def per_row(stored: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """``[E, N, K]`` to E4M3 values and float32 scales ``[E, N]``, a power of two a row.

    MXFP4 codes stay exact where a row's exponents span few enough binades (11 at least); other weights are rounded.
    """
    experts, rows, columns = stored.shape
    values = torch.empty(experts, rows, columns, dtype=torch.float8_e4m3fn, device=stored.device)
    scales = torch.empty(experts, rows, dtype=torch.float32, device=stored.device)
    for expert in range(experts):  # one at a time: float32 is eight times MXFP4
        values[expert], scale = fp8.quantize_activations(stored[expert].dequantize(), None)
        scales[expert] = scale[:, 0]
    return values, scales


def bf16(stored: QuantizedTensor) -> Tensor:
    """``[E, N, K]`` bf16."""
    out = torch.empty(stored.shape, dtype=torch.bfloat16, device=stored.device)
    for expert in range(stored.shape[0]):
        out[expert] = stored[expert].dequantize(torch.bfloat16)
    return out


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[M, K]`` to E4M3 and float32 scales ``[M]``, amax / 448 a row."""
    wide = x.to(torch.float32)
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(fp8.AMAX_FLOOR) / fp8.MAX
    return (wide / scale).to(torch.float8_e4m3fn), scale[:, 0]


def round_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """``[M, K]`` to E4M3 and float32 scales ``[M, K / 128]`` with strides (1, M), amax / 448 a group."""
    wide = x.to(torch.float32).unflatten(-1, (-1, fp8.ACTIVATION_GROUP))
    scale = wide.abs().amax(-1, keepdim=True).clamp_min(fp8.AMAX_FLOOR) / fp8.MAX
    columns = scale[..., 0].t().clone(memory_format=torch.contiguous_format)  # contiguous() leaves one row as it is
    return (wide / scale).to(torch.float8_e4m3fn).flatten(-2), columns.t()


class PlainLinear:
    """``[N, K]`` dequantised to bf16."""

    def __init__(self, stored: QuantizedTensor) -> None:
        self.weight = stored.dequantize(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)


class BlockLinear:
    """``[N, K]`` E4M3 with 128x128 scales, by cuBLAS.

    Its scales are ``[ceil(K / 128) rounded up to 4, N / 128]``, the first dimension contiguous
    (``cublasLtMatmulMatrixScale``, "128x128 2D block scaling for FP8"). It refuses one row (CUDA 13.0): tokens come in
    fours, so that each column of their scales begins on 16 bytes.
    """

    def __init__(self, stored: QuantizedTensor) -> None:
        self.values = stored.values.t()
        scales = stored.scale_values()
        self.scales = functional.pad(scales, (0, -scales.shape[-1] % 4)).t()

    def __call__(self, x: Tensor) -> Tensor:
        kinds = functional.ScalingType
        values, scales = round_groups(functional.pad(x, (0, 0, 0, -len(x) % 4)))
        y = functional.scaled_mm(
            values, self.values, scales, kinds.BlockWise1x128, self.scales, kinds.BlockWise128x128,
            output_dtype=torch.bfloat16,
        )  # fmt: skip
        return y[: len(x)]
