"""DeepSeek-V4's modules as vLLM builds them for a GPU; import after ``pytest.importorskip("vllm.model_executor")``."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.models.deepseek_v4.nvidia.model import DeepseekV4MoE
from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest
    from torch import nn

HIDDEN, WIDTH, EXPERTS, TOP_K = 256, 128, 16, 6

MODEL: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "moe_intermediate_size": WIDTH,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "n_shared_experts": 1,
    "num_hash_layers": 1,
    "vocab_size": 64,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
    "expert_dtype": "fp4",
}


def describe(engine: Any, patch: pytest.MonkeyPatch, **facts: Any) -> None:
    """Make the engine's model one of these facts; stand in for what only a GPU, or a CPU with AMX, has."""
    patch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")  # routers of V4 have no CPU kernel
    kernel = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    patch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: kernel)  # a CPU without AMX has none either
    model = SimpleNamespace(dtype=torch.bfloat16, head_dtype=torch.bfloat16, quantization=None)
    model.hf_config = SimpleNamespace(**MODEL, **facts)
    patch.setattr(engine, "model_config", model)
    patch.setattr(engine, "quant_config", DeepseekV4FP8Config(True, "dynamic", None, [128, 128]))


def in_bf16(build: Callable[..., Any], *arguments: Any, **facts: Any) -> Any:
    """What ``build`` makes of its arguments, as vLLM's loader calls it."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        return build(*arguments, **facts)
    finally:
        torch.set_default_dtype(torch.float32)


def build_moe(engine: Any, prefix: str, kind: type = DeepseekV4MoE) -> Any:
    """A layer's MoE module, its weights not loaded."""
    asked = inspect.signature(kind.__init__).parameters
    facts = {"num_hash_layers": MODEL["num_hash_layers"]} if "num_hash_layers" in asked else {}
    return in_bf16(kind, engine, prefix=prefix, **facts)


def dummy_moe(engine: Any, prefix: str) -> Any:
    """A layer's MoE module with vLLM's dummy weights, processed."""
    moe = build_moe(engine, prefix)
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(moe, engine.model_config)
    process(moe)
    return moe


def process(model: nn.Module) -> None:
    """What vLLM's loader does after the last weight."""
    for module in model.modules():
        if isinstance(method := getattr(module, "quant_method", None), QuantizeMethodBase):
            method.process_weights_after_loading(module)
