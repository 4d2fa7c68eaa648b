"""DeepSeek-V4's own MoE module, as vLLM builds it for a GPU, with vLLM's dummy weights (``--load-format dummy``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldmoe.reference import reference_moe
from tests.support.cases import assert_close

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")

from foldmoe.integrations.vllm import plugin
from tests.vllm.factory import call
from tests.vllm.gpu_models import EXPERTS, HIDDEN, describe, dummy_moe

TOKENS = 19


@pytest.mark.parametrize("layer", [0, 1], ids=["hashed", "scored"])
def test_dummy_weights_fold(engine: Any, layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No scale is NaN, none is refused, and the layer computes what its packed weights say."""
    describe(engine, monkeypatch)
    moe = dummy_moe(engine, f"dummy.layers.{layer}.ffn")
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
