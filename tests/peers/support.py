"""A small layer as DeepSeek-V4 stores it, and torch stand-ins for kernels that need a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foldmoe import Format
from foldmoe.bench import shapes
from foldmoe.formats import e2m1, e8m0

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec


def layer(
    routed: Format = Format.MXFP4, shared: Format = Format.FP8_128x128, limit: float | None = 1.0
) -> tuple[LayerSpec, tuple[ExpertWeights, ExpertWeights]]:
    """H 256, I 128, 4 experts, top-2; the clamp bites on most of its gates."""
    spec = shapes._spec(256, 4, 128, routed, shared, limit, top_k=2)
    assert spec.shared is not None
    generator = torch.Generator().manual_seed(0)
    weights = tuple(shapes.random_weights(part, spec.hidden, generator) for part in (spec.routed, spec.shared))
    return spec, (weights[0], weights[1])


def batch(spec: LayerSpec, tokens: int = 5) -> Batch:
    return shapes.random_batch(spec, tokens, torch.Generator().manual_seed(1))


def nibbles(words: Tensor) -> Tensor:
    """int32 words to their 4-bit codes, lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((words[..., None] >> shifts) & 0xF).flatten(-2)


def decode(weight: Tensor, weight_scale: Tensor, columns: int) -> Tensor:
    """Numbers that humming's stored form stands for, float32 ``[..., N, K]``."""
    if weight_scale.dtype == torch.float8_e8m0fnu:
        values = e2m1.decode(nibbles(weight).to(torch.uint8), torch.float32)
        scales = e8m0.decode(weight_scale, torch.float32)
    else:
        values = weight.view(torch.float8_e4m3fn).to(torch.float32)
        scales = weight_scale.to(torch.float32)
    scales = scales.repeat_interleave(values.shape[-2] // scales.shape[-2], dim=-2)
    return values * scales.repeat_interleave(columns // scales.shape[-1], dim=-1)


def align(topk_ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """What vLLM's ``moe_align_block_size`` documents."""
    flat, order, owners = topk_ids.flatten(), [], []
    for expert in range(experts):
        mine = (flat == expert).nonzero()[:, 0].tolist()
        mine += [flat.numel()] * (-len(mine) % block)
        order += mine
        owners += [expert] * (len(mine) // block)
    return tuple(torch.tensor(part, dtype=torch.int32) for part in (order, owners, [len(order)]))  # type: ignore[return-value]
