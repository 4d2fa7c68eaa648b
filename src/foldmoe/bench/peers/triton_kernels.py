"""OpenAI's triton_kernels, the copy that vLLM ships: ``matmul_ogs`` over MXFP4 weights upcast to bf16.

The launches are those of vLLM's ``UnfusedOAITritonExperts`` without what LoRA alone needs: pack and sort the routes,
GEMM 1, clamp and SwiGLU, GEMM 2 with the routing weight, sum. OpenAI's fused SwiGLU adds 1 to up; this layer does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foldmoe.bench.peers import vllm_layer
from foldmoe.bench.peers.base import Peer, PeerLayer, hopper
from foldmoe.bench.peers.marlin import mxfp4
from foldmoe.bench.peers.vllm_layer import VllmLayer, gated

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec


class TritonKernelsLayer(VllmLayer):
    """Routed experts in the layout that triton_kernels chooses for this GPU."""

    def __init__(self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights) -> None:
        super().__init__(spec, shared)
        stored = mxfp4(routed)
        self.up = _swizzled(stored["w13_weight"], stored["w13_weight_scale"])
        self.down = _swizzled(stored["w2_weight"], stored["w2_weight_scale"])

    def routed(self, batch: Batch) -> Tensor:
        """``[M, H]``, weighted (by weights in bf16, as vLLM passes them) and added."""
        from triton_kernels.matmul_ogs import matmul_ogs
        from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import make_routing_data

        routing, gather, scatter = make_routing_data(batch.topk_ids, batch.topk_weights, self.spec.routed.count)
        weight, precision = self.up
        gate_up = matmul_ogs(batch.x, weight, None, routing, gather_indx=gather, precision_config=precision)
        hidden = gated(gate_up.view(-1, gate_up.shape[-1]), self.spec.activation)
        weight, precision = self.down
        y: Tensor = matmul_ogs(
            hidden, weight, None, routing, scatter_indx=scatter, precision_config=precision, gammas=routing.gate_scal
        )
        return y.view(batch.x.shape)


def _swizzled(weight: Tensor, scale: Tensor) -> tuple[Any, Any]:
    """uint8 ``[E, N, K / 2]`` and ``[E, N, K / 32]`` to triton_kernels' weight and the config that holds its scales."""
    from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4

    weight, flex, scale = _swizzle_mxfp4(weight, scale)  # first: it makes triton_kernels importable
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig

    return weight, PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=flex))


class TritonKernels(Peer):
    """W4A16, gpt-oss's kernels; the shared expert by DeepGEMM FP8."""

    name = "triton-kernels"
    package = vllm_layer.PACKAGE
    tolerance = 0.08  # the shared expert, most of the output, is W8A8

    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        return vllm_layer.refusals(spec) + ([reason] if (reason := hopper(device)) else [])

    def prepare(
        self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]
    ) -> PeerLayer:
        return TritonKernelsLayer(spec, routed, shared)
