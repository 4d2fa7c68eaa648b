"""What the peers from vLLM have in common: the release, the shared expert, the gated activation.

On Hopper vLLM runs block-FP8 linear layers by DeepGEMM (``DeepGemmFp8BlockScaledMMKernel``): a shared expert is x
rounded, GEMM 1, clamp and SwiGLU, rounding, GEMM 2; then one more launch adds it to the routed experts' result.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from foldmoe.bench.peers.base import PeerLayer, installed
from foldmoe.bench.peers.torch_weights import PlainLinear
from foldmoe.formats import Format, fp8

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.formats import QuantizedTensor
    from foldmoe.moe import Activation, ExpertWeights, LayerSpec

PACKAGE = "vllm==0.25.1"


def refusals(spec: LayerSpec) -> list[str]:
    """Why no peer from vLLM can run ``spec``: the package, the formats, the activation."""
    found = [reason] if (reason := installed(PACKAGE)) else []
    if find_spec("deep_gemm"):
        found.append("vLLM would use the deep_gemm beside it, not its own: give one of them another environment")
    return found + stored(spec)


def stored(spec: LayerSpec) -> list[str]:
    """Why a peer for MXFP4 experts, a block-FP8 shared expert and SwiGLU cannot run ``spec``."""
    found = []
    if spec.routed.format is not Format.MXFP4:
        found.append(f"routed experts are {spec.routed.format.value}; this peer is for mxfp4")
    if spec.shared is None or spec.shared.format not in (Format.FP8_128x128, Format.FP8_32x32):
        found.append("the shared expert is not block FP8")
    if not (spec.activation.is_silu and spec.shared_activation.is_silu):
        found.append("the activation is not silu(gate) * up")
    return found


def gated(gate_up: Tensor, activation: Activation) -> Tensor:
    """``[M, 2I]`` bf16 (gate, then up) to ``[M, I]`` in one launch."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation

    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    apply_moe_activation(MoEActivation.SILU, out, gate_up, clamp_limit=activation.limit)
    return out


class DeepGemmLinear:
    """``[N, K]`` E4M3 with 128x128 scales by DeepGEMM, activations rounded as vLLM's switches say (powers of two)."""

    def __init__(self, weight: QuantizedTensor) -> None:
        self.weight = weight.values.contiguous(), weight.scale_values().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
        from vllm.utils.deep_gemm import fp8_gemm_nt, is_deep_gemm_e8m0_used

        y = torch.empty(len(x), len(self.weight[0]), dtype=torch.bfloat16, device=x.device)
        rounded = per_token_group_quant_fp8(x, fp8.ACTIVATION_GROUP, column_major_scales=True, tma_aligned_scales=True)
        fp8_gemm_nt(rounded, self.weight, y, is_deep_gemm_e8m0_used=is_deep_gemm_e8m0_used())
        return y


class VllmLayer(PeerLayer):
    """The shared expert; a subclass adds the routed ones. 32x32 blocks, which DeepGEMM does not take, run in bf16."""

    def __init__(self, spec: LayerSpec, shared: ExpertWeights) -> None:
        linear = DeepGemmLinear if shared.format is Format.FP8_128x128 else PlainLinear
        self.spec = spec
        self.shared_up, self.shared_down = linear(shared.gate_up[0]), linear(shared.down[0])

    def shared(self, batch: Batch) -> Tensor:
        return self.shared_down(gated(self.shared_up(batch.x), self.spec.shared_activation))
