"""Transformers' own MoE block as an arm: its experts functions, then the shared MLP, then the add."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foldmoe.formats import Format

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec

IMPLEMENTATIONS = ("eager", "grouped_mm")


def transformers_arms(
    spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights
) -> dict[str, Callable[[Batch], Tensor]]:
    """One arm an implementation, over the very weights given.

    Raises:
        ValueError: weights that are not bf16: Transformers would hold another model.
    """
    if routed.format is not Format.BF16 or shared.format is not Format.BF16:
        raise ValueError("Transformers' own experts are compared on bf16 weights")
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Config, DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=spec.hidden,
        moe_intermediate_size=routed.width,
        n_routed_experts=routed.num_experts,
        num_experts_per_tok=spec.top_k,
        n_shared_experts=1,
        n_group=1,
        topk_group=1,
    )
    import torch

    with torch.device("meta"):
        block: Any = DeepseekV3MoE(config).to(torch.bfloat16)

    def parameter(values: Tensor) -> torch.nn.Parameter:
        return torch.nn.Parameter(values, requires_grad=False)

    block.experts.gate_up_proj = parameter(routed.gate_up.values)
    block.experts.down_proj = parameter(routed.down.values)
    gate, up = (half.values[0] for half in shared.gate_and_up())
    for part, values in (("gate_proj", gate), ("up_proj", up), ("down_proj", shared.down.values[0])):
        getattr(block.shared_experts, part).weight = parameter(values)

    def arm(implementation: str) -> Callable[[Batch], Tensor]:
        def run(batch: Batch) -> Tensor:
            block.experts.config._experts_implementation = implementation
            routed = block.experts(batch.x, batch.topk_ids.long(), batch.topk_weights.to(batch.x.dtype))
            out: Tensor = routed + block.shared_experts(batch.x)
            return out

        return run

    return {f"transformers {name}": arm(name) for name in IMPLEMENTATIONS}
