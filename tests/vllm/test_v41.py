"""DeepSeek-V4.1's own MoE module, whose shared expert vLLM reads as MXFP8: scales of 32x32, each row's its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foldmoe.formats import Format
from foldmoe.reference import reference_moe
from tests.support.cases import assert_close, make_layer

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")
pytest.importorskip("vllm.models.deepseek_v41.nvidia.model", reason="this vLLM has no DeepSeek-V4.1")

from vllm.model_executor.layers.quantization import modelopt
from vllm.models.deepseek_v41.nvidia.model import DeepseekV4MoE
from vllm.models.deepseek_v41.quant_config import DeepseekV4FP8Config

from foldmoe.integrations.vllm import plugin
from tests.vllm.factory import call
from tests.vllm.gpu_models import EXPERTS, HIDDEN, WIDTH, build_moe, describe, process

TOKENS = 19


@pytest.fixture
def described(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine with V4.1's quantisation; MXFP8 kernels are a GPU's."""
    describe(engine, monkeypatch, num_hidden_layers=2)
    monkeypatch.setattr(engine, "quant_config", DeepseekV4FP8Config(True, "dynamic", None, [32, 32]))
    kernel = SimpleNamespace(process_weights_after_loading=lambda layer: None)
    monkeypatch.setattr(modelopt, "select_linear_kernel", lambda *_, **__: kernel)
    monkeypatch.setattr(modelopt, "expose_input_quant_key", lambda *_, **__: None, raising=False)
    return engine


def _load(moe: Any, routed: Any, shared: Any) -> None:
    """Every tensor as the checkpoint has it, by the parameters' own loaders."""
    inner = moe.experts.routed_experts
    for expert in range(EXPERTS):
        gate, up = routed[expert : expert + 1].gate_and_up()
        for shard, part, tensor in (("w1", "w13", gate), ("w3", "w13", up), ("w2", "w2", routed.down[expert])):
            for end, values in (("weight", tensor.values), ("weight_scale", tensor.scales)):
                parameter, whole = getattr(inner, f"{part}_{end}"), values[0] if values.dim() == 3 else values
                assert parameter.weight_loader(parameter, whole, f"{part}_{end}", shard, expert, True)
    merged, down = moe.shared_experts.gate_up_proj, moe.shared_experts.down_proj
    for end, name in (("values", "weight"), ("scales", "weight_scale")):
        parameter = getattr(merged, name)
        for number, half in enumerate(shared.gate_and_up()):
            parameter.weight_loader(parameter, getattr(half, end)[0], number)
        parameter = getattr(down, name)
        parameter.weight_loader(parameter, getattr(shared.down, end)[0])


@pytest.mark.parametrize("layer", [1, 2], ids=["", "draft"])
@pytest.mark.parametrize("width", [WIDTH, 96])
def test_it_folds_with_every_bit_of_the_checkpoint(
    described: Any, width: int, layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each scale once, as stored; the layer computes what the checkpoint says."""
    monkeypatch.setattr(described.model_config.hf_config, "moe_intermediate_size", width)
    pair = make_layer(Format.MXFP4, Format.FP8_32x32, EXPERTS, width, width, HIDDEN, e8m0_scales=True)
    moe = build_moe(described, f"v41_{width}.layers.{layer}.ffn", DeepseekV4MoE)
    _load(moe, *pair)
    process(moe)
    entry = plugin.record().entries[-1]
    assert entry.reasons == ()
    assert entry.plan is not None
    assert (entry.plan.strategy, entry.plan.activations, entry.plan.extra_bytes) == ("native", "fp8", 0)
    assert entry.plan.spec.shared.e8m0_scales
    assert entry.moe is not None
    found = entry.moe.unpack()[1]
    for kept, stored in zip(found.gate_and_up(), pair[1].gate_and_up(), strict=True):
        assert torch.equal(kept.dequantize(), stored.dequantize())
    assert torch.equal(found.down.dequantize(), pair[1].down.dequantize())
    assert not list(moe.shared_experts.parameters()), "vLLM keeps no copy of the shared expert"

    x, logits = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.randn(TOKENS, EXPERTS)
    none = torch.zeros(TOKENS, dtype=torch.int32)
    torch.manual_seed(7)
    y = call(described, moe.experts, x, logits, none)
    torch.manual_seed(7)
    weights, ids = moe.experts.router.select_experts(x, logits, None, input_ids=none)
    expected = reference_moe(x, ids, weights, *pair, activation=entry.plan.spec.activation, activations="fp8")
    assert_close(y, expected, 6e-3)
