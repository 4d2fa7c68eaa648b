"""The layers that are timed, and random weights and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor, blocks
from foldmoe.moe import Activation, ExpertSpec, ExpertWeights, LayerSpec


@dataclass(frozen=True)
class Shape:
    """A layer to time, and what it stands for."""

    what: str
    spec: LayerSpec


def _spec(
    hidden: int,
    experts: int,
    width: int,
    routed: Format,
    shared: Format,
    limit: float | None = None,
    top_k: int = 6,
    e8m0_scales: bool = True,
) -> LayerSpec:
    return LayerSpec(
        "bench",
        hidden,
        top_k,
        ExpertSpec(experts, width, routed, e8m0_scales=routed.fp8 and e8m0_scales),
        ExpertSpec(1, width, shared, e8m0_scales=shared.fp8 and e8m0_scales),
        Activation(limit),
        Activation(limit),
        activations="bf16" if routed is Format.BF16 else "fp8",
    )


def _fp8(hidden: int, experts: int, width: int, top_k: int = 8) -> LayerSpec:
    """Block FP8 throughout, with float32 scales."""
    return _spec(hidden, experts, width, Format.FP8_128x128, Format.FP8_128x128, top_k=top_k, e8m0_scales=False)


SHAPES = {
    "A": Shape("DeepSeek-V4-Flash, one GPU", _spec(4096, 256, 2048, Format.MXFP4, Format.FP8_128x128, 10.0)),
    "A-tp8": Shape("one TP8 rank of DeepSeek-V4-Flash", _spec(4096, 256, 256, Format.MXFP4, Format.FP8_128x128, 10.0)),
    "B": Shape("one EP8 rank of DeepSeek-V4-Flash", _spec(4096, 32, 2048, Format.MXFP4, Format.FP8_128x128, 10.0)),
    "C": Shape("one EP8 rank of DeepSeek-V4.1-Flash", _spec(5120, 48, 2304, Format.MXFP4, Format.FP8_32x32, 10.0)),
    "D": Shape("one EP8 rank of DeepSeek-V4-Pro", _spec(7168, 48, 3072, Format.MXFP4, Format.FP8_128x128, 10.0)),
    "V3": Shape("DeepSeek-V3, all experts", _fp8(7168, 256, 2048)),
    "GLM-4.5": Shape("GLM-4.5 in block FP8, all experts", _fp8(5120, 160, 1536)),
    "GLM": Shape("GLM-4.5-Air in block FP8, all experts", _fp8(4096, 128, 1408)),
    "GLM-bf16": Shape("GLM-4.5-Air, all experts", _spec(4096, 128, 1408, Format.BF16, Format.BF16, top_k=8)),
    "Qwen3-Next": Shape("Qwen3-Next in block FP8, all experts", _fp8(2048, 512, 512, top_k=10)),
    "cpu": Shape("bf16 layer of a size for CPUs", _spec(1024, 64, 512, Format.BF16, Format.BF16)),
    "cpu-v4": Shape("the same layer as DeepSeek-V4 stores it", _spec(1024, 64, 512, Format.MXFP4, Format.FP8_128x128)),
}

WHOLE = ("A", "V3", "GLM-4.5", "GLM", "GLM-bf16", "Qwen3-Next")
"""Shapes with all experts of a model; the others are one rank's part."""

CUT_IN_WIDTH = ("A-tp8",)
"""One rank's part by tensor parallelism: of every expert, so that experts are not spread over ranks besides."""


def random_weights(spec: ExpertSpec, hidden: int, generator: torch.Generator) -> ExpertWeights:
    """Random stored bytes, never zeros; numbers of about 1 / sqrt(fan-in)."""
    stacked = replace(spec, block=(gcd(spec.block[0], spec.width), spec.block[1]))  # as from_parts would regrid it
    gate_up = _random(stacked, (spec.count, 2 * spec.width, hidden), generator)
    return ExpertWeights(gate_up, _random(spec, (spec.count, hidden, spec.width), generator))


def _random(spec: ExpertSpec, shape: tuple[int, int, int], generator: torch.Generator) -> QuantizedTensor:
    experts, rows, columns = shape
    device, deviation = generator.device, columns**-0.5
    if spec.format is Format.BF16:
        values = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(std=deviation, generator=generator)
        return QuantizedTensor(values, format=spec.format)
    stored = columns // 2 if spec.format.packed else columns
    raw = torch.randint(0, 256, (experts, rows, stored), dtype=torch.uint8, device=device, generator=generator)
    grid = (experts, *blocks.scale_shape(rows, columns, spec.block))
    # Uniform E2M1 codes deviate by about 2.9; E4M3 bytes are kept below 16 in magnitude and deviate by about 4.
    exponent = round(torch.log2(torch.tensor(deviation / (2.9 if spec.format.packed else 4.0))).item())
    scales = torch.randint(126 + exponent, 129 + exponent, grid, dtype=torch.uint8, device=device, generator=generator)
    if spec.format.packed:
        return QuantizedTensor(raw, scales.view(torch.float8_e8m0fnu), format=spec.format, block=spec.block)
    values = _small_e4m3(raw)
    kept = scales.view(torch.float8_e8m0fnu) if spec.e8m0_scales else torch.exp2(scales.to(torch.float32) - 127)
    return QuantizedTensor(values, kept, format=spec.format, block=spec.block)


def _small_e4m3(raw: Tensor) -> Tensor:
    """Random bytes to E4M3 numbers of magnitude below 16, NaN excluded."""
    sign, magnitude = raw & 0x80, raw & 0x7F
    return (sign | torch.where(magnitude >= 0x58, magnitude - 0x30, magnitude)).view(torch.float8_e4m3fn)


@dataclass(frozen=True, eq=False)
class Batch:
    """Inputs of one call: ``x [M, H]``, ``topk_ids [M, K]`` int32, ``topk_weights [M, K]`` float32."""

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


def random_batch(spec: LayerSpec, tokens: int, generator: torch.Generator) -> Batch:
    """bf16 activations and uniform routing without repeats in a row; weights sum to 1."""
    device = generator.device
    x = torch.randn(tokens, spec.hidden, device=device, generator=generator).to(torch.bfloat16)
    scores = torch.rand(tokens, spec.routed.count, device=device, generator=generator)
    weights, ids = scores.topk(spec.top_k, dim=-1)
    return Batch(x, ids.to(torch.int32), weights / weights.sum(-1, keepdim=True))


def floor_bytes(spec: LayerSpec, ids: Tensor) -> int:
    """Bytes that any kernel must read and write: distinct experts touched, the shared expert, x and y."""
    touched = int(ids.unique().numel())
    shared = spec.shared.nbytes(spec.hidden) if spec.shared else 0
    return touched * spec.routed.nbytes(spec.hidden) + shared + 4 * ids.shape[0] * spec.hidden


def flops(spec: LayerSpec, tokens: int) -> int:
    """Multiplications and additions of the layer's products."""
    width = spec.top_k * spec.routed.width + (spec.shared.width if spec.shared else 0)
    return 2 * tokens * 3 * spec.hidden * width
