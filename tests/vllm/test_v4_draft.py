"""DeepSeek-V4's own draft (MTP) model, as vLLM builds it for a GPU, behind a layer of the main model.

vLLM's CPU platform has a stub of it that raises. Attention, GPU streams, FP8 linear kernels and routing are stand-ins;
the model class, its MoE module and its loader are vLLM's.
"""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from foldmoe.formats import Format
from foldmoe.planner import FusionPolicy
from foldmoe.reference import reference_moe
from tests.support.cases import assert_close, make_layer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from foldmoe.moe import ExpertWeights

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")

from vllm.models.deepseek_v4.nvidia import model as v4
from vllm.models.deepseek_v4.nvidia.mtp import DeepSeekV4MTP

from foldmoe.integrations.vllm import plugin
from foldmoe.integrations.vllm.record import Record
from tests.vllm.factory import call
from tests.vllm.gpu_models import EXPERTS, HIDDEN, WIDTH, describe, dummy_moe, in_bf16, process

TOKENS = 19
FACTS = {
    "num_hidden_layers": 2,
    "mlp_layer_types": ["hash_moe", "moe"],
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "hc_eps": 1e-6,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 2,
    "index_topk": 16,
    "model_type": "deepseek_v4_mtp",
}


class NoAttention(nn.Module):
    """In place of an attention class; each asks for kernels of its GPU."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def _checkpoint(draft: nn.Module, routed: ExpertWeights, shared: ExpertWeights) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of ``mtp.0`` by its name in DeepSeek's checkpoints; those outside the experts random."""
    for expert in range(-1, EXPERTS):
        weights = shared if expert < 0 else routed[expert : expert + 1]
        owner = "shared_experts" if expert < 0 else f"experts.{expert}"
        for name, part in zip(("w1", "w3", "w2"), (*weights.gate_and_up(), weights.down), strict=True):
            assert part.scales is not None
            yield f"mtp.0.ffn.{owner}.{name}.weight", part.values[0]
            yield f"mtp.0.ffn.{owner}.{name}.scale", part.scales[0]
    prefix = f"model.layers.{FACTS['num_hidden_layers']}."
    for name, parameter in draft.named_parameters():
        if "experts" not in name:
            stored = name.removeprefix(prefix).replace("mtp_block.", "").replace("weight_scale_inv", "scale")
            stored = stored.replace("model.embed_tokens", "emb.tok_emb").replace("shared_head.", "")
            stored = stored.replace("gate.e_score_correction_bias", "gate.bias")
            yield f"mtp.0.{stored}", torch.rand(parameter.shape).to(parameter.dtype)


def test_the_draft_layer_folds_and_counts(
    engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MXFP4 routed and block-FP8 shared experts, loaded by the draft model's own ``load_weights``."""
    monkeypatch.setattr(plugin, "_record", Record(FusionPolicy("native"), tmp_path, plugin.record().versions))
    monkeypatch.setattr(plugin.logger(), "propagate", True)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    describe(engine, monkeypatch, **FACTS)
    monkeypatch.setattr(v4, "_select_dsv4_attn_cls", lambda _: NoAttention)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    if hasattr(engine.kernel_config, "enable_jit_warmup"):
        monkeypatch.setattr(engine.kernel_config, "enable_jit_warmup", False)  # no GPU, no kernels to compile
    drafts = SimpleNamespace(draft_model_config=engine.model_config)
    monkeypatch.setattr(engine, "speculative_config", drafts)

    with caplog.at_level(logging.INFO, "vllm.foldmoe"):
        dummy_moe(engine, "model.layers.1.ffn")
        draft = in_bf16(DeepSeekV4MTP, vllm_config=engine)
        routed, shared = make_layer(Format.MXFP4, Format.FP8_128x128, EXPERTS, WIDTH, WIDTH, HIDDEN, e8m0_scales=True)
        loaded = draft.load_weights(_checkpoint(draft, routed, shared))
        assert loaded == set(dict(draft.named_parameters())), "a parameter without a weight proves nothing"
        process(draft)
    lines = [message for message in caplog.messages if message.startswith("foldmoe: ")]
    print(*lines, sep="\n")
    assert lines[0] == "foldmoe: folded 1/1 layers (native 1, slot 0), +0 B"
    assert lines[-1] == "foldmoe: folded 2/2 layers (native 2, slot 0), +0 B, draft layers 1/1"
    state = json.loads((tmp_path / "rank-0.json").read_text())
    assert (state["layers_folded"], state["draft_folded"], state["draft_total"]) == (2, 1, 1)
    assert [(layer["layer"], layer["draft"]) for layer in state["layers"]] == [
        ("model.layers.1.ffn.experts", False),
        ("model.layers.2.ffn.experts", True),
    ]

    ffn = draft.model.layers["2"].mtp_block.ffn
    entry = plugin.record().entries[-1]
    assert entry.plan is not None
    assert not list(ffn.shared_experts.parameters()), "vLLM keeps no copy of the shared expert"
    x, logits = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.randn(TOKENS, EXPERTS)
    torch.manual_seed(7)
    found = call(engine, ffn.experts, x, logits)
    torch.manual_seed(7)
    weights, ids = ffn.experts.router.select_experts(x, logits, None)
    clamp = entry.plan.spec.activation
    expected = reference_moe(x, ids, weights, routed, shared, activation=clamp, activations="fp8")
    assert_close(found, expected, 6e-3)
