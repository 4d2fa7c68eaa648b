"""Layers built by vLLM's own factory in this process; import after ``pytest.importorskip("vllm.model_executor")``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.fused_moe import layer as vllm_layer
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config

from foldmoe.formats import Format

if TYPE_CHECKING:
    from foldmoe.moe import ExpertWeights

EXPERTS, TOP_K, WIDTH, SHARED, HIDDEN, TOKENS = 8, 2, 128, 256, 128, 19

make_runner = getattr(vllm_layer, "FusedMoEFactory", None) or vllm_layer.FusedMoE
"""vLLM's own factory; until 0.25.1 it was called FusedMoE."""


class Linear(nn.Module):
    """The parameters of a vLLM linear layer; without AMX a CPU has no FP8 kernel of vLLM's to build a real one with."""

    def __init__(self, tensor: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(tensor.values[0].clone(), requires_grad=False)
        if tensor.scales is not None:
            self.weight_scale_inv = nn.Parameter(tensor.scales[0].clone(), requires_grad=False)
            self.weight_block_size = list(tensor.format.block)


class SharedMLP(nn.Module):
    """As vLLM's models build theirs."""

    def __init__(self, weights: ExpertWeights, gate: nn.Module | None = None) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = Linear(weights.gate_up), Linear(weights.down)
        self.act_fn = SiluAndMul()
        self.expert_gate = gate


def has_cpu_routers() -> bool:
    """vLLM 0.25.1 has a kernel for softmax routing on GPUs alone."""
    return find_spec("vllm.model_executor.layers.fused_moe.router.cpu_router") is not None


def quant_config(routed: Format) -> Any:
    if routed is Format.BF16:
        return None
    kind = DeepseekV4FP8Config if routed is Format.MXFP4 else Fp8Config
    return kind(True, "dynamic", None, [128, 128])


def build(routed: ExpertWeights, shared: nn.Module, name: str, **facts: Any) -> Any:
    """Build, load and process one layer.

    Args:
        routed: of all ranks.
        shared: its shared MLP, loaded.
        name: the layer's prefix is ``name.experts``.
        facts: more of the factory's arguments.
    """
    if not has_cpu_routers():
        facts["custom_routing_function"] = lambda gating_output, **_: routes(gating_output)[::-1]
    torch.set_default_dtype(torch.bfloat16)
    try:
        runner = make_runner(
            EXPERTS,
            TOP_K,
            HIDDEN,
            routed.width,
            params_dtype=torch.bfloat16,
            quant_config=quant_config(routed.format),
            prefix=f"{name}.experts",
            shared_experts=shared,
            **facts,
        )
    finally:
        torch.set_default_dtype(torch.float32)
    inner = runner.routed_experts
    for expert in range(EXPERTS):
        gate_part, up_part = routed[expert : expert + 1].gate_and_up()
        for shard, part, tensor in (
            ("w1", "w13", gate_part),
            ("w3", "w13", up_part),
            ("w2", "w2", routed.down[expert]),
        ):
            named = {"weight": tensor.values, inner.quant_method.raw.storage.scale_name: tensor.scales}
            for end, values in named.items():
                if values is not None:
                    parameter = getattr(inner, f"{part}_{end}")
                    whole = values[0] if values.dim() == 3 else values
                    assert parameter.weight_loader(parameter, whole, f"{part}_{end}", shard, expert, True)
    for module in runner.modules():  # as vLLM's loader does
        if isinstance(method := getattr(module, "quant_method", None), QuantizeMethodBase):
            method.process_weights_after_loading(module)
    return runner


def call(engine: Any, runner: Any, x: Tensor, logits: Tensor, token_ids: Tensor | None = None) -> Tensor:
    with set_forward_context(None, engine, num_tokens=len(x)), torch.no_grad():
        y: Tensor = runner(x, logits, token_ids)
    return y


def routes(logits: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(TOP_K, -1)
    return ids, weights / weights.sum(-1, keepdim=True)
