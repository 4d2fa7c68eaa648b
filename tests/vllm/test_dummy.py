"""DeepSeek-V4's own MoE module, as vLLM builds it for a GPU, with vLLM's dummy weights (``--load-format dummy``)."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foldmoe.reference import reference_moe
from tests.support.cases import assert_close

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")

from vllm.config.load import LoadConfig
from vllm.model_executor.layers.quantization import fp8
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.models.deepseek_v4.nvidia.model import DeepseekV4MoE
from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config

from foldmoe.integrations.vllm import plugin
from tests.vllm.factory import call

HIDDEN, WIDTH, EXPERTS, TOP_K, TOKENS = 256, 128, 16, 6, 19

MODEL = SimpleNamespace(
    hidden_size=HIDDEN,
    moe_intermediate_size=WIDTH,
    n_routed_experts=EXPERTS,
    num_experts_per_tok=TOP_K,
    n_shared_experts=1,
    num_hash_layers=1,
    vocab_size=64,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    norm_topk_prob=True,
    scoring_func="sqrtsoftplus",
    topk_method="noaux_tc",
    hidden_act="silu",
    expert_dtype="fp4",
)


@pytest.mark.parametrize("layer", [0, 1], ids=["hashed", "scored"])
def test_dummy_weights_fold(engine: Any, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No scale is NaN, none is refused, and the layer computes what its packed weights say."""
    monkeypatch.setenv("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random")  # routers of V4 have no CPU kernel
    monkeypatch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: None)  # a CPU without AMX has none either
    model = SimpleNamespace(dtype=torch.bfloat16, hf_config=MODEL, quantization=None)
    monkeypatch.setattr(engine, "model_config", model)
    monkeypatch.setattr(engine, "quant_config", DeepseekV4FP8Config(True, "dynamic", None, [128, 128]))
    asked = inspect.signature(DeepseekV4MoE.__init__).parameters
    facts = {"num_hash_layers": MODEL.num_hash_layers} if "num_hash_layers" in asked else {}
    torch.set_default_dtype(torch.bfloat16)
    try:
        moe = DeepseekV4MoE(engine, prefix=f"dummy.layers.{layer}.ffn", **facts)
    finally:
        torch.set_default_dtype(torch.float32)
    DummyModelLoader(LoadConfig(load_format="dummy")).load_weights(moe, model)
    for module in moe.modules():
        if isinstance(method := getattr(module, "quant_method", None), QuantizeMethodBase):
            method.process_weights_after_loading(module)
    entry = plugin.record().entries[-1]
    assert entry.plan is not None
    assert entry.plan.folded
    assert (entry.plan.activations, entry.plan.extra_bytes) == ("fp8", 0)
    assert entry.moe is not None
    assert not list(moe.shared_experts.parameters()), "vLLM keeps no copy of the shared expert"

    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    logits = torch.randn(TOKENS, EXPERTS)
    torch.manual_seed(7)
    found = call(engine, moe.experts, x, logits, torch.zeros(TOKENS, dtype=torch.int32))
    torch.manual_seed(7)
    weights, ids = moe.experts.router.select_experts(x, logits, None, input_ids=torch.zeros(TOKENS, dtype=torch.int32))
    routed, shared = entry.moe.unpack()
    assert shared is not None
    assert shared.down.dequantize().any(), "zeros alone would prove nothing"
    expected = reference_moe(
        x, ids, weights, routed, shared, activation=entry.plan.spec.activation, activations="fp8"
    )  # fmt: skip
    assert_close(found, expected, 6e-3)
