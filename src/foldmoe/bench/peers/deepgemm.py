"""vLLM's DeepGEMM experts: FP8 weights with 128x128 scales, grouped by rows in the contiguous layout.

The launches are those of ``DeepGemmExperts.apply``: round x, count and sort the routes, GEMM 1, clamp and SwiGLU and
round, GEMM 2, weighted sum. vLLM itself leaves batches under 128 tokens to another kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foldmoe.bench.peers import vllm_layer
from foldmoe.bench.peers.base import Peer, PeerLayer, hopper
from foldmoe.bench.peers.fp8_experts import block_fp8
from foldmoe.bench.peers.vllm_layer import VllmLayer
from foldmoe.formats import fp8

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec

_MULTIPLE = 128
_GATHERED = 1024
"""Columns that vLLM's weighted sum (``ep_gather``) takes at a time; a hidden size above is a multiple."""


class DeepGemmLayer(VllmLayer):
    """Routed experts dequantised and held as FP8."""

    def __init__(self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights) -> None:
        super().__init__(spec, shared)
        self.up, self.down = block_fp8(routed.gate_up), block_fp8(routed.down)

    def routed(self, batch: Batch) -> Tensor:
        """``[M, H]``, weighted and added."""
        from vllm.model_executor.layers.fused_moe.deep_gemm_utils import (
            deepgemm_moe_permute,
            deepgemm_unpermute_and_reduce,
        )
        from vllm.model_executor.layers.quantization.utils.fp8_utils import (
            per_token_group_quant_fp8,
            silu_mul_per_token_group_quant_fp8_colmajor,
        )
        from vllm.utils.deep_gemm import m_grouped_fp8_gemm_nt_contiguous, mk_alignment_scope

        x, scales = per_token_group_quant_fp8(batch.x, fp8.ACTIVATION_GROUP)
        x, scales, owners, places, rows = deepgemm_moe_permute(
            aq=x,
            aq_scale=scales,
            topk_ids=batch.topk_ids,
            local_num_experts=self.spec.routed.count,
            expert_map=None,
            expert_tokens_meta=None,
        )
        with mk_alignment_scope(rows):
            gate_up = batch.x.new_empty(len(x), self.up[0].shape[1])
            m_grouped_fp8_gemm_nt_contiguous((x, scales), self.up, gate_up, owners)
            hidden = silu_mul_per_token_group_quant_fp8_colmajor(gate_up, clamp_limit=self.spec.activation.limit)
            down = batch.x.new_empty(len(x), self.spec.hidden)
            m_grouped_fp8_gemm_nt_contiguous(hidden, self.down, down, owners)
        y = torch.empty_like(batch.x)
        deepgemm_unpermute_and_reduce(
            a=down,
            topk_ids=batch.topk_ids,
            topk_weights=batch.topk_weights,
            inv_perm=places,
            expert_map=None,
            output=y,
        )
        return y


class DeepGemm(Peer):
    """W8A8, 1x128 by 128x128 scales (1.9 times MXFP4's bytes), as DeepSeek-V3 has them."""

    name = "deepgemm"
    package = vllm_layer.PACKAGE
    tolerance = 0.08

    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        found = vllm_layer.refusals(spec) + ([reason] if (reason := hopper(device)) else [])
        if spec.hidden % _MULTIPLE or spec.routed.width % _MULTIPLE:
            found.append(
                f"DeepGEMM takes multiples of {_MULTIPLE}, found hidden {spec.hidden} and width {spec.routed.width}"
            )
        if spec.hidden > _GATHERED and spec.hidden % _GATHERED:
            found.append(f"vLLM's weighted sum takes multiples of {_GATHERED} columns, found hidden {spec.hidden}")
        return found

    def prepare(
        self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]
    ) -> PeerLayer:
        return DeepGemmLayer(spec, routed, shared)
