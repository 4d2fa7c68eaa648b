"""Torch stand-ins for the peers' kernels: what their sources document, one expert at a time."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from foldmoe.bench.peers import torch_weights
from foldmoe.formats import e2m1, e8m0

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from .signatures import Recorder

ROWS = 4
"""Rows that DeepGEMM's contiguous layout gives an expert at least."""


def mxfp4(codes: Tensor, scales: Tensor) -> Tensor:
    """uint8 ``[..., N, K / 2]`` and ``[..., N, K / 32]`` to float32 ``[..., N, K]``."""
    assert codes.dtype == scales.dtype == torch.uint8
    return e2m1.decode(e2m1.unpack(codes), torch.float32) * e8m0.decode(scales).repeat_interleave(32, dim=-1)


def blocks(weight: tuple[Tensor, Tensor]) -> Tensor:
    """E4M3 ``[..., N, K]`` and float32 128x128 scales to float32."""
    values, scales = weight
    assert (values.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert scales.shape[-2:] == (values.shape[-2] // 128, values.shape[-1] // 128)
    return values.to(torch.float32) * scales.repeat_interleave(128, -2).repeat_interleave(128, -1)


def groups(x: tuple[Tensor, Tensor]) -> Tensor:
    """E4M3 ``[M, K]`` and float32 1x128 scales to float32."""
    return x[0].to(torch.float32) * x[1].repeat_interleave(128, dim=-1)


def gated(gate_up: Tensor, limit: float | None) -> Tensor:
    gate, up = gate_up.to(torch.float32).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return functional.silu(gate) * up


def experts(x: Tensor, ids: Tensor, weights: Tensor, up: Tensor, down: Tensor, limit: float | None) -> Tensor:
    """``[M, H]`` float32 of float32 weights ``[E, 2I, H]`` and ``[E, H, I]``."""
    y = torch.zeros(len(x), down.shape[1])
    for row in range(len(x)):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist(), strict=True):
            hidden = gated(x[row].to(torch.float32) @ up[expert].T, limit)
            y[row] += weight * (hidden @ down[expert].T)
    return y


def vllm(recorder: Recorder) -> None:
    """What every peer from vLLM calls: rounding, DeepGEMM's dense product, the activation."""
    layers = "vllm.model_executor.layers"

    def activation(
        kind: str,
        output: Tensor,
        input: Tensor,
        *,
        clamp_limit: float | None = None,
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> Tensor:
        assert kind == "silu"
        return output.copy_(gated(input, clamp_limit))

    recorder.module(
        f"{layers}.fused_moe.activation",
        MoEActivation=SimpleNamespace(SILU="silu"),
        apply_moe_activation=activation,
    )

    def unrounded(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.to(torch.float32), torch.ones(len(x), x.shape[1] // 128)

    def quantize(x: Tensor, group_size: int, **_: Any) -> tuple[Tensor, Tensor]:
        assert group_size == 128
        return unrounded(x)

    def gated_quantize(input: Tensor, clamp_limit: float | None = None, **_: Any) -> tuple[Tensor, Tensor]:
        return unrounded(gated(input.nan_to_num(), clamp_limit))

    recorder.module(
        f"{layers}.quantization.utils.fp8_utils",
        per_token_group_quant_fp8=quantize,
        silu_mul_per_token_group_quant_fp8_colmajor=gated_quantize,
    )

    def dense(a: Any, b: Any, out: Tensor, is_deep_gemm_e8m0_used: bool) -> None:
        out.copy_(groups(a) @ blocks(b).T)

    def grouped(a: Any, b: Any, out: Tensor, owners: Tensor) -> None:
        weight = blocks(b)
        for row, owner in enumerate(owners.tolist()):
            if owner >= 0:
                out[row] = groups((a[0][row], a[1][row])) @ weight[owner].T

    @contextmanager
    def scope(value: int) -> Iterator[None]:
        assert value == ROWS
        yield

    recorder.module(
        "vllm.utils.deep_gemm",
        is_deep_gemm_e8m0_used=lambda: True,
        fp8_gemm_nt=dense,
        m_grouped_fp8_gemm_nt_contiguous=grouped,
        mk_alignment_scope=scope,
    )


def vllm_permutation(recorder: Recorder) -> None:
    def permute(
        aq: Tensor,
        aq_scale: Tensor,
        topk_ids: Tensor,
        local_num_experts: int,
        expert_map: None,
        expert_tokens_meta: None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
        rows: list[int] = []
        owners: list[int] = []
        places = torch.empty(topk_ids.shape, dtype=torch.int32)
        for expert in range(local_num_experts):
            for token, slot in (topk_ids == expert).nonzero().tolist():
                places[token, slot] = len(rows)
                rows.append(token)
                owners.append(expert)
            padding = -len(rows) % ROWS
            rows += [0] * padding
            owners += [-1] * padding
        return aq[rows], aq_scale[rows], torch.tensor(owners, dtype=torch.int32), places, ROWS

    def reduce(
        a: Tensor, topk_ids: Tensor, topk_weights: Tensor, inv_perm: Tensor, expert_map: None, output: Tensor
    ) -> None:
        output.copy_((a[inv_perm.long()].to(torch.float32) * topk_weights[..., None]).sum(1))

    recorder.module(
        "vllm.model_executor.layers.fused_moe.deep_gemm_utils",
        deepgemm_moe_permute=permute,
        deepgemm_unpermute_and_reduce=reduce,
    )


def marlin(recorder: Recorder) -> None:
    layers = "vllm.model_executor.layers"
    vllm(recorder)

    def prepare(layer: Any) -> None:
        config = layer.moe_config
        assert layer.w13_weight.shape == (
            config.num_experts,
            2 * config.intermediate_size_per_partition,
            config.hidden_dim // 2,
        )
        for name in ("w13", "w2"):
            setattr(
                layer, f"{name}_weight", mxfp4(getattr(layer, f"{name}_weight"), getattr(layer, f"{name}_weight_scale"))
            )
        layer.workspace = torch.zeros(1, dtype=torch.int32)

    def run(
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        output: Tensor,
        **given: Any,
    ) -> None:
        assert given["quant_type_id"] == 7
        assert given["activation"] == "silu"
        output.copy_(experts(hidden_states, topk_ids, topk_weights, w1, w2, given["clamp_limit"]))

    recorder.module(f"{layers}.quantization.utils.marlin_utils_fp4", prepare_moe_fp4_layer_for_marlin=prepare)
    recorder.module(f"{layers}.fused_moe.experts.marlin_moe", fused_marlin_moe=run)
    recorder.module("vllm._custom_ops", moe_sum=None)
    recorder.module("vllm.scalar_type", scalar_types=SimpleNamespace(float4_e2m1f=SimpleNamespace(id=7)))


def triton_kernels(recorder: Recorder) -> None:
    layers = "vllm.model_executor.layers"
    vllm(recorder)

    def swizzle(quant_tensor: Tensor, scale: Tensor) -> tuple[Tensor, None, None]:
        return mxfp4(quant_tensor, scale).transpose(-2, -1), None, None

    def routing(topk_ids: Tensor, topk_weights: Tensor, num_local_experts: int) -> tuple[Any, Any, Any]:
        order = topk_ids.flatten().argsort(stable=True)
        data = SimpleNamespace(
            gate_scal=topk_weights.flatten()[order], experts=topk_ids.flatten()[order], top_k=topk_ids.shape[1]
        )
        return data, order // data.top_k, order // data.top_k

    def matmul(x: Tensor, w: Tensor, bias: None, routing_data: Any, **given: Any) -> Tensor:
        rows = x[given["gather_indx"]] if "gather_indx" in given else x
        y = torch.stack(
            [row.to(torch.float32) @ w[expert] for row, expert in zip(rows, routing_data.experts, strict=True)]
        )
        if "scatter_indx" not in given:
            return y.to(x.dtype)
        y *= given["gammas"][:, None]
        return torch.zeros(len(y) // routing_data.top_k, y.shape[1]).index_add_(0, given["scatter_indx"], y).to(x.dtype)

    recorder.module(f"{layers}.quantization.utils.mxfp4_utils", _swizzle_mxfp4=swizzle)
    recorder.module(f"{layers}.fused_moe.experts.gpt_oss_triton_kernels_moe", make_routing_data=routing)
    recorder.module(
        "triton_kernels.matmul_ogs", matmul_ogs=matmul, FlexCtx=SimpleNamespace, PrecisionConfig=SimpleNamespace
    )


def deep_gemm(recorder: Recorder) -> None:
    """sgl-deep-gemm's MegaMoE: routes copied to the buffer with -1 after them, then the layer."""

    def transform(first: Any, second: Any) -> tuple[Any, Any]:
        return first, second

    def pre_dispatch(
        x: Tensor, topk_idx: Tensor, topk_weights: Tensor, buf_x: Tensor, buf_x_sf: Tensor, ids: Tensor,
        weights: Tensor, num_tokens: int,
    ) -> None:  # fmt: skip
        assert (topk_idx.dtype, topk_weights.dtype) == (torch.int32, torch.float32)
        assert num_tokens <= len(buf_x)
        buf_x[:num_tokens], buf_x_sf[:num_tokens] = torch_weights.round_groups(x)
        ids.fill_(-1)
        ids[:num_tokens], weights[:num_tokens] = topk_idx.long(), topk_weights

    def run(y: Tensor, first: Any, second: Any, sym_buffer: Any, activation_clamp: float | None) -> None:
        assert sym_buffer.group.rank() == 0
        assert sym_buffer.handle.buffer_ptrs == [sym_buffer.buffer.data_ptr()]
        assert sym_buffer.num_experts == len(first[0])
        rows = slice(0, len(y))
        x = groups((sym_buffer.x[rows], sym_buffer.x_sf[rows]))
        ids, weights = sym_buffer.topk_idx[rows], sym_buffer.topk_weights[rows]
        assert ids.shape[1] == sym_buffer.num_topk
        y.copy_(experts(x, ids, weights, blocks(first), blocks(second), activation_clamp))

    def size(ranks: int, count: int, rows: int, top_k: int, hidden: int, width: int, fp8: bool, kind: str) -> Any:
        assert (ranks, fp8, kind) == (1, True, "swiglu")
        parts = (
            torch.zeros(rows, hidden, dtype=torch.float8_e4m3fn),
            torch.zeros(rows, hidden // 128),
            torch.zeros(rows, top_k, dtype=torch.int64),
            torch.zeros(rows, top_k),
        )
        return 64, lambda memory: parts

    recorder.module(
        "deep_gemm",
        transform_weights_for_mega_moe_sm90=transform,
        mega_moe_pre_dispatch_sm90=pre_dispatch,
        fp8_mega_moe=run,
        _C=SimpleNamespace(get_token_alignment_for_mega_moe=lambda: 8, get_symm_buffer_size_for_sm90_mega_moe=size),
    )
    recorder.module("deep_gemm.utils.math", align=lambda x, y: -(-x // y) * y)


def flashinfer(recorder: Recorder) -> None:
    """FlashInfer's experts take up before gate, and scales as an offset from half the residual of an expert."""

    def preprocess(weight: Tensor, raw_scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        assert len(weight) == len(raw_scale) == 1
        least = raw_scale.min()
        offset = (raw_scale - least + 1).to(torch.uint8)
        return weight, offset, torch.exp2(least[None].to(torch.float32) - 127) * 0.5

    def run(
        input: Tensor, ids: Tensor, weights: Tensor, first: Tensor, second: Tensor, dtype: torch.dtype, scales: Any,
        *, output: Tensor, swiglu_alpha: Tensor, swiglu_beta: Tensor, swiglu_limit: Tensor, **given: Any,
    ) -> None:  # fmt: skip
        assert given["use_w4_group_scaling"]
        assert given["use_wfp4afp8_humming"]
        assert scales[0].dtype == scales[3].dtype == torch.int32
        assert len({tuple(part.shape) for part in (swiglu_alpha, swiglu_beta, swiglu_limit)}) == 1
        assert (swiglu_alpha == 1).all()
        assert (swiglu_beta == 0).all()

        def numbers(codes: Tensor, offset: Tensor, residual: Tensor) -> Tensor:
            # Offset + 127 is an exponent of its own; the kernel's epilogue takes out the residual's 2 ** 6.
            whole = mxfp4(codes, offset.view(torch.uint8) + 127)
            return whole * (residual / 64)[:, None, None]

        up = numbers(first, scales[0], scales[1])
        up = torch.cat(up.chunk(2, dim=1)[::-1], dim=1)
        down = numbers(second, scales[3], scales[4])
        output.copy_(experts(input, ids, weights, up, down, float(swiglu_limit[0])))

    def linear(input: Tensor, weight: Tensor, input_scale: None, weight_scale: Tensor) -> Tensor:
        return (input.to(torch.float32) @ blocks((weight, weight_scale)).T).to(input.dtype)

    recorder.module("flashinfer.gemm", fp8_blockscale_gemm_sm90=linear)
    recorder.module(
        "flashinfer.fused_moe", cutlass_fused_moe=run, preprocess_moe_weights_for_sm90_mixed_gemm_humming=preprocess
    )
    recorder.module("flashinfer.autotuner", autotune=lambda tune_mode, tuning_buckets: nullcontext())
