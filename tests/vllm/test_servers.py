"""Real vLLM servers on this CPU: the same checkpoint stock and folded; ``make test-vllm`` runs these."""

from __future__ import annotations

import json
import random
import shlex
from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe.evaluate import items
from foldmoe.evaluate.skills import TINY_V4
from foldmoe.planner import FusionPolicy
from foldmoe.verify import verify
from tests.vllm import checkpoints, standins
from tests.vllm.agreement import (
    EDGE,
    GAP,
    PROMPTS,
    agreement,
    clear_choices,
    forks,
    gaps_of_differing,
    greedy,
    running,
    spoken,
)
from tests.vllm.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")
pytestmark = pytest.mark.timeout(900)

ITEMS = 12
CHAT = "\"<bos>{{ messages[0]['content'] }}\""
"""A chat template, quoted: the user's words as they are."""


@pytest.mark.parametrize(
    ("make", "layers", "batched"), [(checkpoints.glm, 1, 16384), (checkpoints.deepseek_v3, 2, 8192)], ids=["glm", "v3"]
)
def test_folded_names_the_same_tokens_as_stock(
    make: Callable[[Path], Path], layers: int, batched: int, tmp_path: Path
) -> None:
    """Both have a routed scale of 2.5, which vLLM's runner would put on the shared part too.

    The layers of the checkpoint that is served are compared with the reference as well.
    """
    if make is checkpoints.deepseek_v3:
        pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla", reason="this vLLM has no MLA on CPUs")
    model = make(tmp_path / "model")
    _verified(model, layers)
    zeroed = checkpoints.without_shared(model, tmp_path / "zeroed")
    common = ("--skip-tokenizer-init", "--max-num-batched-tokens", str(batched), "--max-model-len", "256")
    stock = Server(model, tmp_path / "stock", "stock", common)
    folded = Server(model, tmp_path / "folded", "native", common, {"VLLM_SERVER_DEV_MODE": "1"})
    with running(stock, folded):
        expected, found = stock.scores(PROMPTS), folded.scores(PROMPTS)
        with pytest.raises(RuntimeError, match="answered 500"):
            folded.post("collective_rpc", {"method": "reload_weights"})
        assert folded.scores(PROMPTS) == found, "a refused reload changed something"
        said = [spoken(server, PROMPTS) for server in (stock, folded)]
    assert "reload_weights is refused and nothing was changed: foldmoe packed" in folded.log
    with running(Server(zeroed, tmp_path / "without", "native", common)) as (without,):
        negative = without.scores(PROMPTS)

    for server, texts in zip((stock, folded), said, strict=True):
        print(f"{server.fold} says {[ranked[0][1] for ranked in texts[0]]}")
    gaps = forks(*said)
    print(f"{len(gaps)} of {len(PROMPTS)} answers part, at gaps of {gaps}")
    # As each decodes: vLLM's attention on a CPU gives other numbers there than in a prompt, stock as well.
    assert max(gaps, default=0) <= GAP
    assert len(gaps) < len(PROMPTS) / 2
    clear, same, total = agreement(expected, found)
    worst = max(abs(p[0][0] - dict((t, s) for s, t in q).get(p[0][1], 0)) for a, b in zip(expected, found, strict=True)
                for p, q in zip(a, b, strict=True))  # fmt: skip
    print(f"{same}/{clear} clear positions of {total} agree, log probabilities within {worst:.1e}")
    assert clear > 0.7 * total
    assert same == clear
    changed_clear, changed_same, _ = agreement(expected, negative)
    assert changed_same < 0.9 * changed_clear, "the shared expert does not matter to this checkpoint"

    assert f"foldmoe: folded {layers}/{layers} layers (native {layers}, slot 0), +0 B" in folded.log
    assert f"foldmoe: folded 0/{layers} layers" in stock.log
    assert stock.log.count("stock: FOLDMOE_FOLD=stock leaves") == layers
    assert (folded.state["arm"], stock.state["arm"]) == ("folded", "stock")
    assert folded.state["layers_folded"] == folded.state["layers_total"] == layers
    assert folded.state["complete"]
    assert folded.state["kv_blocks"] == stock.state["kv_blocks"] > 0
    assert stock.state["moe_bytes"] == 0 < folded.state["moe_bytes"]


@pytest.mark.slow
def test_a_step_of_sixteen_thousand_rows(tmp_path: Path) -> None:
    """One prompt fills a step of ``--max-num-batched-tokens 16384``, so that the folded layer gets all rows at once."""
    length = 16_000
    model = checkpoints.glm(tmp_path / "model", positions=16_384)
    common = ("--skip-tokenizer-init", "--max-num-batched-tokens", "16384", "--max-model-len", "16384")
    stock = Server(model, tmp_path / "stock", "stock", common)
    folded = Server(model, tmp_path / "folded", "native", common)
    draw = random.Random(7)
    prompts = [[draw.randrange(3, 512) for _ in range(length)]]
    with running(stock, folded):
        found = folded.scores(prompts, top=2)
        steps = [folded.metric(f"vllm:iteration_tokens_total_{part}") for part in ("count", "sum")]
        expected = stock.scores(prompts, top=2)
    clear, same, total = agreement(expected, found)
    print(f"{steps[1]:.0f} tokens in {steps[0]:.0f} step(s); {same}/{clear} clear positions of {total} agree")
    assert steps[1] / steps[0] >= length
    assert total == length - 1
    assert clear > 0.7 * total
    assert same == clear
    assert "foldmoe: folded 1/1 layers (native 1, slot 0), +0 B" in folded.log


def test_draft_layers_fold_and_count(tmp_path: Path) -> None:
    """GLM with a draft (MTP) layer; each token that it says is the stock server's likeliest one, where that is clear.

    DeepSeek-V4's own draft model is not served here, since vLLM's CPU platform has a stub of it that raises;
    ``test_v4_draft`` builds the one for GPUs.
    """
    model = checkpoints.with_draft(checkpoints.glm(tmp_path / "glm", top_k=8), tmp_path / "model")
    common = ("--skip-tokenizer-init", "--max-num-batched-tokens", "8192", "--max-model-len", "256")
    drafts = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 1}))
    stock = Server(model, tmp_path / "stock", "stock", common)
    folded = Server(model, tmp_path / "folded", "native", (*common, *drafts))
    with running(stock, folded):
        said = greedy(folded, PROMPTS)
        likeliest = clear_choices(stock, PROMPTS, said)
        drafted = folded.metric("vllm:spec_decode_num_draft_tokens_total")
    print(f"{drafted:.0f} drafted; {len(likeliest)} clear tokens of {sum(map(len, said))}")
    assert drafted > 0
    assert len(likeliest) > 0.5 * sum(map(len, said))
    assert all(token == best for token, best in likeliest)
    assert "foldmoe: folded 2/2 layers (native 2, slot 0), +0 B, draft layers 1/1" in folded.log
    assert [(layer["layer"], layer["draft"]) for layer in folded.state["layers"]] == [
        ("model.layers.1.mlp.experts", False),
        ("model.layers.2.mlp.experts", True),
    ]


def test_tiny_v4_keeps_its_score_in_vllms_own_model_code(tmp_path: Path) -> None:
    """MXFP4 routed and block-FP8 shared experts, hashed and scored layers, a routed scale of 1.5 in the weights."""
    pytest.importorskip("vllm.models.deepseek_v4.cpu", reason="this vLLM's DeepSeek-V4 is for GPUs alone")
    environment = standins.install(tmp_path / "plugin", "standins")
    # Activations in float32: in bf16 both arms round 4e-3 away from each other in every layer, and the filler between
    # the needles has no likely next word, so that hardly a gap would be clear.
    common = f"--dtype float32 --max-model-len 1024 --max-num-seqs 1 --no-enable-prefix-caching --chat-template {CHAT}"
    # Of itself vLLM takes DeepSeek-V4's own chat encoding, which this model has never seen, for the template.
    common += " --reasoning-parser deepseek_r1 --tokenizer-mode hf"
    model = checkpoints.thinking(TINY_V4, tmp_path / "model")
    zeroed = checkpoints.without_shared(model, tmp_path / "zeroed")
    without = Server(zeroed, tmp_path / "without", "native", tuple(shlex.split(common)), environment)
    arms = {
        fold: Server(model, tmp_path / fold, fold, tuple(shlex.split(common)), environment)
        for fold in ("stock", "native")
    }
    asked = items.needle_items(ITEMS, 2026)
    with running(*arms.values()):
        answers = {fold: [_answer(server, item.prompt) for item in asked] for fold, server in arms.items()}
        tokens = [arms["stock"].post("tokenize", {"prompt": item.prompt})["tokens"] for item in asked]
        scores = {fold: server.scores(tokens) for fold, server in arms.items()}
        sums = items.arithmetic_items(ITEMS // 3, 2026)
        streamed = {fold: [_streamed_chat(server, item.prompt) for item in sums] for fold, server in arms.items()}
        plain = {fold: [_chat(server, item.prompt) for item in sums] for fold, server in arms.items()}
    with running(without):
        negative = without.scores(tokens[:4])
    changed_clear, changed_same, _ = agreement(scores["stock"][:4], negative)
    print(f"without the shared expert {changed_same}/{changed_clear}")
    assert changed_same < 0.95 * changed_clear, "the shared expert does not matter to this checkpoint"
    right = {
        fold: sum(item.is_solved_by(text) for text, item in zip(said, asked, strict=True))
        for fold, said in answers.items()
    }
    clear, same, total = agreement(scores["stock"], scores["native"])
    gaps = gaps_of_differing(scores["stock"], scores["native"])
    print(f"right answers {right} of {len(asked)}; {same}/{clear} clear positions of {total} agree")
    print("gaps where they differ:", *(f"{gap:.3f}" for gap in gaps))
    assert right["stock"] >= 0.9 * len(asked)
    assert right["native"] >= right["stock"]
    assert len(gaps) == clear - same <= 0.005 * clear
    assert max(gaps, default=0) <= EDGE
    assert streamed["stock"] == streamed["native"] == plain["stock"] == plain["native"]
    assert [content.strip() for _, content in plain["native"]] == [item.answer for item in sums]
    assert all("=" in reasoning for reasoning, _ in plain["native"])
    assert "foldmoe: folded 5/5 layers (native 5, slot 0), +0 B" in arms["native"].log
    state = arms["native"].state
    assert {layer["routed"] for layer in state["layers"]} == {"16x128 mxfp4"}
    assert {layer["activations"] for layer in state["layers"]} == {"fp8"}


def _verified(model: Path, layers: int) -> None:
    """Each layer's error in float32 and, over as many rows as the prompts have, in bf16, as it is served."""
    for dtype, tokens in ((torch.float32, 16), (torch.bfloat16, sum(map(len, PROMPTS)))):
        checks = list(verify(model, policy=FusionPolicy("native"), dtype=dtype, tokens=tokens))
        for check in checks:
            print(f"{check.layer} in {dtype}: {check.how}, error {check.folded:.1e} of {check.tolerance:.0e} allowed")
        assert [problem for check in checks for problem in check.problems] == []
        assert [check.how for check in checks] == ["native on torch"] * layers


def _answer(server: Server, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 10, "temperature": 0}
    text: str = server.post("v1/completions", body)["choices"][0]["text"]
    return text


def _question(prompt: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 40, "temperature": 0}


def _chat(server: Server, prompt: str) -> tuple[str, str]:
    """(reasoning, content) of an answer in one piece."""
    message = server.post("v1/chat/completions", _question(prompt))["choices"][0]["message"]
    return message["reasoning"] or "", message["content"] or ""


def _streamed_chat(server: Server, prompt: str) -> tuple[str, str]:
    """(reasoning, content) of a streamed answer, put together; all of the reasoning comes first, in several pieces."""
    deltas = [event["choices"][0]["delta"] for event in server.stream("v1/chat/completions", _question(prompt))]
    pieces = [(kind, text) for delta in deltas for kind in ("reasoning", "content") if (text := delta.get(kind))]
    kinds = [kind for kind, _ in pieces]
    assert kinds == sorted(kinds, reverse=True)
    assert kinds.count("reasoning") > 1
    reasoning, content = ("".join(text for of, text in pieces if of == kind) for kind in ("reasoning", "content"))
    return reasoning, content
