"""Random experts in a stored format, under a family's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor, fp8, mxfp4, nvfp4

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True)
class Storage:
    """How a set of experts is stored.

    Args:
        format: of all three projections.
        e8m0: one-byte scales; None takes the format's habit (float32 for FP8 128x128, E8M0 otherwise).
        packed_dtype: of two 4-bit codes: DeepSeek-V4 writes int8.
        scale: suffix of the scales' names.
        scale_dtype: of E8M0 scales, which some checkpoints write as plain bytes.
    """

    format: Format
    e8m0: bool | None = None
    packed_dtype: torch.dtype = torch.int8
    scale: str = "weight_scale_inv"
    scale_dtype: torch.dtype = torch.float8_e8m0fnu

    def store(self, weight: Tensor) -> dict[str, Tensor]:
        """``[..., N, K]`` numbers to stored tensors by suffix."""
        quantized = self.quantize(weight)
        values, scales = quantized.values, quantized.scales
        stored = {"weight": values.view(self.packed_dtype) if self.format is Format.MXFP4 else values}
        if scales is not None:
            stored[self.scale] = scales.view(self.scale_dtype) if quantized.e8m0_scales else scales
        if quantized.global_scale is not None:
            stored["weight_scale_2"] = quantized.global_scale
        return {suffix: tensor.contiguous() for suffix, tensor in stored.items()}

    def quantize(self, weight: Tensor) -> QuantizedTensor:
        if self.format is Format.MXFP4:
            return mxfp4.quantize(weight)
        if self.format is Format.NVFP4:
            return nvfp4.quantize(weight)
        if self.format.fp8:
            return fp8.quantize_block(weight, self.format, e8m0_scales=self.e8m0)
        return QuantizedTensor(weight.to(torch.bfloat16), format=Format.BF16)


@dataclass(frozen=True)
class Naming:
    """A family's names under a block.

    Args:
        matrices: gate, up and down of routed experts.
        shared_matrices: the same for the shared expert; the routed ones' by default.
        shared: the shared expert's place.
        bias: the selection bias, or None.
        stacked: "gate_up_proj" (as Transformers names stacks) or "w13" (as vLLM does); None for one name an expert.
    """

    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared_matrices: tuple[str, str, str] | None = None
    shared: str = "shared_experts"
    bias: str | None = "gate.e_score_correction_bias"
    stacked: str | None = None


@dataclass(frozen=True)
class Geometry:
    """Sizes of one MoE layer.

    Args:
        hidden, width, experts, top_k: H, I, E, k.
        shared_width: 0 for no shared expert; the routed width by default.
        gated: a sigmoid gate weighs the shared expert (Qwen).
    """

    hidden: int = 256
    width: int = 128
    experts: int = 8
    top_k: int = 2
    shared_width: int | None = None
    gated: bool = False


@dataclass(frozen=True)
class MoERecipe:
    """All that one MoE layer's tensors need."""

    geometry: Geometry
    routed: Storage
    shared: Storage
    naming: Naming = field(default_factory=Naming)


def moe_tensors(block: str, recipe: MoERecipe, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """Router, routed experts and shared expert of one layer, by full name.

    Weights keep variance: rows of a projection have norm one, so that unit-variance x gives unit-variance gate and up.
    """
    g, naming = recipe.geometry, recipe.naming

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random).mul_(columns**-0.5)

    yield f"{block}.gate.weight", draw(g.experts, g.hidden).to(torch.bfloat16)
    if naming.bias:
        yield f"{block}.{naming.bias}", torch.randn(g.experts, generator=random) * 0.01
    shapes = ((g.width, g.hidden), (g.width, g.hidden), (g.hidden, g.width))
    experts = ([draw(*shape) for shape in shapes] for _ in range(g.experts))
    if naming.stacked:
        yield from _stacked(block, naming.stacked, recipe.routed, list(experts))
    else:
        for expert, drawn in enumerate(experts):
            yield from _named(f"{block}.experts.{expert}", naming.matrices, recipe.routed, drawn)
    shared_width = g.width if g.shared_width is None else g.shared_width
    if shared_width:
        shapes = ((shared_width, g.hidden), (shared_width, g.hidden), (g.hidden, shared_width))
        names = naming.shared_matrices or naming.matrices
        yield from _named(f"{block}.{naming.shared}", names, recipe.shared, [draw(*shape) for shape in shapes])
    if g.gated:
        yield f"{block}.shared_expert_gate.weight", draw(1, g.hidden).to(torch.bfloat16)


def _named(
    at: str, matrices: tuple[str, str, str], storage: Storage, weights: list[Tensor]
) -> Iterator[tuple[str, Tensor]]:
    for matrix, weight in zip(matrices, weights, strict=True):
        for suffix, tensor in storage.store(weight).items():
            yield f"{at}.{matrix}.{suffix}", tensor


def _stacked(block: str, style: str, storage: Storage, experts: list[list[Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Gate above up; FP8 scale blocks count from the top of each stack, as both styles' loaders cut them."""
    gate_up = torch.stack([torch.cat(expert[:2]) for expert in experts])
    down = torch.stack([expert[2] for expert in experts])
    names = ("w13", "w2") if style == "w13" else ("gate_up_proj", "down_proj")
    for name, weight in zip(names, (gate_up, down), strict=True):
        for suffix, tensor in storage.store(weight).items():
            if style == "w13":
                yield f"{block}.experts.{name}_{suffix}", tensor
            elif suffix == "weight":
                yield f"{block}.experts.{name}", tensor
            else:
                yield f"{block}.experts.{name}_scale_inv", tensor
