"""vLLM's Marlin experts: MXFP4 weights upcast in registers, what vLLM 0.25 picks for DeepSeek-V4 on Hopper.

W4A16 only: ``get_marlin_input_dtype`` refuses FP8 activations but on sm_89 and sm_12x ("slower than Marlin W4A16 on
other devices"), and MXFP4 weights take no int8 ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from foldmoe.bench.peers import vllm_layer
from foldmoe.bench.peers.base import Peer, PeerLayer, hopper
from foldmoe.bench.peers.vllm_layer import VllmLayer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec

_HIDDEN, _WIDTH = 256, 128
"""vLLM rounds hidden sizes and widths up to these (``mxfp4_round_up_hidden_size_and_intermediate_size``)."""


class MarlinLayer(VllmLayer):
    """``fused_marlin_moe``: align routes, GEMM 1, clamp and SwiGLU, GEMM 2 with the routing weight, sum."""

    def __init__(self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights) -> None:
        from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import prepare_moe_fp4_layer_for_marlin

        super().__init__(spec, shared)
        self.layer = marlin_layer(routed)
        prepare_moe_fp4_layer_for_marlin(self.layer)

    def routed(self, batch: Batch) -> Tensor:
        """``[M, H]``, weighted and added."""
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        y = torch.empty_like(batch.x)
        fused_marlin_moe(
            hidden_states=batch.x,
            w1=self.layer.w13_weight,
            w2=self.layer.w2_weight,
            bias1=None,
            bias2=None,
            w1_scale=self.layer.w13_weight_scale,
            w2_scale=self.layer.w2_weight_scale,
            topk_weights=batch.topk_weights,
            topk_ids=batch.topk_ids,
            quant_type_id=scalar_types.float4_e2m1f.id,
            global_num_experts=self.spec.routed.count,
            activation=MoEActivation.SILU,
            moe_sum=ops.moe_sum,
            workspace=self.layer.workspace,
            output=y,
            clamp_limit=self.spec.activation.limit,
        )
        return y


def marlin_layer(weights: ExpertWeights) -> SimpleNamespace:
    """MXFP4 weights under the names by which vLLM's preparation reads them; it replaces tensors, and changes none."""
    experts, hidden, width = weights.down.shape
    return SimpleNamespace(
        params_dtype=torch.bfloat16,
        moe_config=SimpleNamespace(num_experts=experts, hidden_dim=hidden, intermediate_size_per_partition=width),
        **mxfp4(weights),
    )


def mxfp4(weights: ExpertWeights) -> dict[str, Tensor]:
    """uint8 ``w13_weight [E, 2I, H / 2]``, ``w13_weight_scale [E, 2I, H / 32]``, and w2's, as checkpoints hold them."""
    found: dict[str, Tensor] = {}
    for name, stored in (("w13", weights.gate_up), ("w2", weights.down)):
        assert stored.scales is not None
        found[f"{name}_weight"] = stored.values.view(torch.uint8).contiguous()
        found[f"{name}_weight_scale"] = stored.scales.view(torch.uint8).contiguous()
    return found


class Marlin(Peer):
    """W4A16, what vLLM 0.25 serves DeepSeek-V4 with on Hopper; the shared expert by DeepGEMM FP8."""

    name = "marlin"
    package = vllm_layer.PACKAGE
    tolerance = 0.08  # the shared expert, most of the output, is W8A8

    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        found = vllm_layer.refusals(spec) + ([reason] if (reason := hopper(device)) else [])
        if spec.hidden % _HIDDEN or spec.routed.width % _WIDTH:
            found.append(
                f"vLLM pads hidden sizes to {_HIDDEN} and widths to {_WIDTH} for Marlin, which this peer does not; "
                f"found {spec.hidden} and {spec.routed.width}"
            )
        return found

    def prepare(
        self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]
    ) -> PeerLayer:
        return MarlinLayer(spec, routed, shared)
