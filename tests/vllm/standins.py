"""Plain torch in place of DeepSeek-V4 operations that vLLM has no kernel for on most CPUs; a plugin for tests alone.

Attention of uncompressed layers (one sequence at a time, whose keys are kept here and not in vLLM's paged cache), FP8
linear layers, the hyper-connections' operations, and an emulation of vLLM's own MXFP4 experts for the stock arm. The
model code, its router, its loader and the MoE runner are vLLM's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from foldmoe.formats import Format, QuantizedTensor
from foldmoe.formats import fp8 as formats
from foldmoe.moe import Activation, routing

THETA = 10000.0
"""tiny-v4's rope_theta."""


def install(folder: Path, *modules: str) -> dict[str, str]:
    """Make vLLM find these modules of this folder as plugins; returns the environment that a server needs for them."""
    about = folder / "foldmoe_standins-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: foldmoe-standins\nVersion: 0\n")
    points = [f"foldmoe_{module} = tests.vllm.{module}:register" for module in modules]
    (about / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *points, ""]))
    return {"PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}


def register() -> None:
    """Replace the operations, in every process that vLLM starts."""
    from vllm.model_executor.layers import mhc
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.router import cpu_router
    from vllm.model_executor.layers.quantization import fp8
    from vllm.models.deepseek_v4.cpu.cpu_sparse import DeepseekV4CPUAttention
    from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config
    from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder

    DeepseekV4FP8Config.get_supported_act_dtypes = lambda self: [torch.bfloat16, torch.float32]
    fp8.init_fp8_linear_kernel = lambda **_: None
    fp8.Fp8LinearMethod.process_weights_after_loading = lambda self, layer: None
    fp8.Fp8LinearMethod.apply = lambda self, layer, x, bias=None: _linear(layer, x, bias)
    mhc.MHCPreOp.forward_cpu = staticmethod(_open_streams)
    mhc.MHCPostOp.forward_cpu = mhc.MHCPostOp.forward_native
    mhc.HCHeadOp.forward_cpu = staticmethod(_head)
    cpu_router._sqrtsoftplus_bias_topk = _route
    DeepseekSparseSWAMetadataBuilder.build = lambda self, prefix, common, fast_build=False: common
    DeepseekV4CPUAttention._wrap_wo_a_process_weights_after_loading = lambda self: None
    DeepseekV4CPUAttention.forward = _attention
    stock = DeepseekV4FP8Config.get_quant_method

    def get_quant_method(self: Any, layer: nn.Module, prefix: str) -> Any:
        return emulated()(layer.moe_config) if isinstance(layer, RoutedExperts) else stock(self, layer, prefix)

    DeepseekV4FP8Config.get_quant_method = get_quant_method


def dequantized(layer: Any) -> Tensor:
    """An FP8 linear layer's numbers, float32."""
    return QuantizedTensor(layer.weight.data, layer.weight_scale_inv.data, format=Format.FP8_128x128).dequantize()


def _linear(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    """In place of vLLM's block-FP8 product."""
    return F.linear(_operand(x).to(torch.float32), dequantized(layer), bias).to(x.dtype)


def _operand(x: Tensor) -> Tensor:
    """x as an FP8 product reads it: E4M3, one scale for 128 columns of a token."""
    sent = formats.quantize_activations(x.to(torch.float32), formats.ACTIVATION_GROUP)
    return formats.dequantize_activations(*sent).to(x.dtype)


def _route(
    router_logits: Tensor,
    top_k: int,
    renormalize: bool,
    e_score_correction_bias: Tensor | None,
    routed_scaling_factor: float,
    input_ids: Tensor | None = None,
    hash_indices_table: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights float32 and ids int32 ``[T, K]``, the scale in the weights."""
    if hash_indices_table is not None and input_ids is not None:
        ids, weights = routing.hashed(
            router_logits, input_ids, hash_indices_table, renormalize=renormalize, routed_scale=routed_scaling_factor
        )
    else:
        ids, weights = routing.top_k(
            router_logits,
            top_k,
            scoring="sqrtsoftplus",
            bias=e_score_correction_bias,
            renormalize=renormalize,
            routed_scale=routed_scaling_factor,
        )
    return weights, ids.to(torch.int32)


def _normed(streams: Tensor, eps: float) -> Tensor:
    """``[T, streams, H]`` to ``[T, streams * H]`` float32 of mean square one."""
    flat = streams.flatten(-2).to(torch.float32)
    return flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def _open_streams(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """A sub-layer's input ``[T, H]`` from ``[T, streams, H]``, last; before it how its output joins the streams."""
    n = residual.shape[-2]
    pre, post, mix = F.linear(_normed(residual, rms_eps), fn).split([n, n, n * n], -1)
    pre_base, post_base, mix_base = hc_base.split([n, n, n * n])
    pre = torch.sigmoid(pre * hc_scale[0] + pre_base) + hc_pre_eps
    post = torch.sigmoid(post * hc_scale[1] + post_base) * hc_post_mult_value
    mix = (mix * hc_scale[2] + mix_base).unflatten(-1, (n, n)).softmax(-1) + hc_sinkhorn_eps
    for half in range(2 * sinkhorn_repeat - 1):  # columns, rows, columns, ..: nearer to all sums being one
        mix = mix / (mix.sum(-1 if half % 2 else -2, keepdim=True) + hc_sinkhorn_eps)
    return post[..., None], mix, (pre[..., None] * residual).sum(-2).to(residual.dtype)


def _head(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, rms_eps: float, eps: float) -> Tensor:
    """``[T, streams, H]`` to ``[T, H]``: streams weighed by gates of their own normalised sum."""
    gates = torch.sigmoid(F.linear(_normed(x, rms_eps), fn) * scale + base) + eps
    return (gates[..., None] * x).sum(-2).to(x.dtype)


def _turn(x: Tensor, positions: Tensor, width: int, back: bool = False) -> Tensor:
    """Interleaved rotary embedding of the last ``width`` columns of ``[T, heads, D]``."""
    speed = THETA ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)
    angle = positions[:, None, None].to(torch.float32) * speed * (-1 if back else 1)
    even, odd = x[..., -width:].to(torch.float32).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(x.dtype)), -1)


def _attention(self: Any, positions: Tensor, hidden_states: Tensor, llama_4_scaling: Any = None) -> Tensor:
    """In place of ``DeepseekV4CPUAttention.forward``: ``[T, H]`` to ``[T, H]``."""
    from vllm.forward_context import get_forward_context

    if get_forward_context().attn_metadata is None:  # vLLM measures memory: nothing to attend to
        return torch.zeros_like(hidden_states)
    tokens, heads, rope = len(hidden_states), self.n_local_heads, self.rope_head_dim
    low, kv = self.fused_wqa_wkv(hidden_states)[0].split([self.q_lora_rank, self.head_dim], -1)
    q = self.wq_b(self.q_norm(low.contiguous())).view(tokens, heads, self.head_dim)
    q = (q.to(torch.float32) * torch.rsqrt(q.to(torch.float32).square().mean(-1, keepdim=True) + self.eps)).to(q.dtype)
    q = _turn(q, positions, rope)
    kv = _turn(self.kv_norm(kv.contiguous())[:, None], positions, rope)[:, 0]

    start = int(positions[0])
    seen = kv if start == 0 else torch.cat((self.kept[:start], kv))
    self.kept = seen
    scores = torch.einsum("thd,sd->hts", q.to(torch.float32), seen.to(torch.float32)) * self.scale
    distance = positions[:, None] - torch.arange(len(seen))
    scores = scores.masked_fill((distance < 0) | (distance >= self.window_size), float("-inf"))
    sink = self.attn_sink[:heads, None, None].expand(-1, tokens, 1)
    shares = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    out = torch.einsum("hts,sd->thd", shares, seen.to(torch.float32)).to(hidden_states.dtype)
    out = _turn(out, positions, rope, back=True).reshape(tokens, self.n_local_groups, -1)
    grouped = dequantized(self.wo_a).view(self.n_local_groups, self.o_lora_rank, -1)
    projected: Tensor = self.wo_b(torch.einsum("tgk,gok->tgo", out.to(torch.float32), grouped).to(out.dtype).flatten(1))
    return projected


def emulated() -> Any:
    """The class that runs stock MXFP4 experts in plain torch; made late, since vLLM is imported in plugins only."""
    from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase

    class EmulatedExperts(FusedMoEMethodBase):  # type: ignore[misc]
        def create_weights(self, layer: Any, **facts: Any) -> None:
            experts, hidden = facts["num_experts"], facts["hidden_size"]
            width = facts["intermediate_size_per_partition"]
            for name, rows, columns in (("w13", 2 * width, hidden), ("w2", hidden, width)):
                for end, each in (("weight", 2), ("weight_scale", 32)):
                    empty = torch.zeros(experts, rows, columns // each, dtype=torch.uint8)
                    parameter = nn.Parameter(empty, requires_grad=False)
                    parameter.weight_loader = facts["weight_loader"]
                    parameter.quant_method = "block"
                    layer.register_parameter(f"{name}_{end}", parameter)

        def process_weights_after_loading(self, layer: Any) -> None:
            for name in ("w13", "w2"):
                stored = (layer._parameters.pop(f"{name}_{end}").data for end in ("weight", "weight_scale"))
                setattr(layer, name, QuantizedTensor(*stored, format=Format.MXFP4).dequantize())

        def get_fused_moe_quant_config(self, layer: Any) -> None:
            return None

        def apply(self, layer: Any, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *_: Any, **__: Any) -> Tensor:
            y = torch.zeros(x.shape, dtype=torch.float32)
            act = Activation(self.moe.swiglu_limit)
            for expert in topk_ids.unique().tolist():
                rows, route = (topk_ids == expert).nonzero(as_tuple=True)
                gate, up = F.linear(_operand(x)[rows].to(torch.float32), layer.w13[expert]).chunk(2, -1)
                part = F.linear(_operand(act(gate, up)), layer.w2[expert])
                y.index_add_(0, rows, part * topk_weights[rows, route, None])
            return y.to(x.dtype)

    return EmulatedExperts
