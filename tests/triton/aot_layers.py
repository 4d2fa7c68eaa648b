"""Layers to compile ahead of time; their weights are zeros, only shapes, formats and strides count."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foldmoe.backends.base import Call
from foldmoe.formats import Format, QuantizedTensor, blocks
from foldmoe.moe import ExpertWeights
from tests.triton.support import BF16, FP8_E8M0, MXFP4, Stored, pack

if TYPE_CHECKING:
    from foldmoe.backends.triton.layer import TritonLayer

EXPERTS, WIDTH, HIDDEN, TOP_K = 256, 256, 512, 6
DECODE, PREFILL = 1, 8192

MAIN_LAYER = (MXFP4, FP8_E8M0, "fp8")
BF16_LAYER = (BF16, BF16, "bf16")


def blank(stored: Stored, experts: int, width: int = WIDTH, hidden: int = HIDDEN) -> ExpertWeights:
    """Experts whose bytes do not matter."""
    format, e8m0 = stored

    def matrix(rows: int, columns: int) -> QuantizedTensor:
        if format is Format.BF16:
            return QuantizedTensor(torch.zeros(experts, rows, columns, dtype=torch.bfloat16), format=format)
        values = torch.zeros(experts, rows, columns // 2 if format.packed else columns, dtype=torch.uint8)
        shape = (experts, *blocks.scale_shape(rows, columns, format.block))
        float_scales = format is not Format.MXFP4 and format is not Format.MXFP8 and not e8m0
        scales = torch.zeros(shape, dtype=torch.float32 if float_scales else torch.uint8)
        return QuantizedTensor(values if format.packed else values.view(torch.float8_e4m3fn), scales, format=format)

    return ExpertWeights(matrix(2 * width, hidden), matrix(hidden, width))


def layer_of(routed: Stored, shared: Stored, activations: str, width: int = WIDTH) -> TritonLayer:
    return pack(blank(routed, EXPERTS, width), blank(shared, 1, width), activations)


def call_of(tokens: int) -> Call:
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    return Call(x, torch.zeros(tokens, TOP_K, dtype=torch.int32), torch.zeros(tokens, TOP_K))
