"""Real vLLM servers on this CPU: the same checkpoint stock and folded; ``make test-vllm`` runs these."""

from __future__ import annotations

import random
import shlex
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from foldmoe.evaluate import items
from foldmoe.evaluate.skills import TINY_V4
from tests.vllm import checkpoints, standins
from tests.vllm.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")
pytestmark = pytest.mark.timeout(900)

GAP = 1e-2
"""Positions whose two likeliest tokens lie closer than this may swap them for a rounding."""

PROMPTS = [[random.Random(seed).randrange(3, 512) for _ in range(48)] for seed in range(6)]


ITEMS = 12
CHAT = "\"{{ messages[0]['content'] }}\""
"""A chat template, quoted: the user's words as they are."""


@contextmanager
def _running(*servers: Server) -> Iterator[tuple[Server, ...]]:
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.stop()


Scores = list[list[list[tuple[float, int]]]]


def _agreement(one: Scores, other: Scores) -> tuple[int, int, int]:
    """(positions with a clear winner, those where both servers name the same, all positions)."""
    pairs = [(p, q) for a, b in zip(one, other, strict=True) for p, q in zip(a, b, strict=True)]
    clear = [(p, q) for p, q in pairs if p[0][0] - p[1][0] > GAP]
    return len(clear), sum(p[0][1] == q[0][1] for p, q in clear), len(pairs)


@pytest.mark.parametrize(
    ("make", "layers", "batched"), [(checkpoints.glm, 1, 16384), (checkpoints.deepseek_v3, 2, 8192)], ids=["glm", "v3"]
)
def test_folded_names_the_same_tokens_as_stock(
    make: Callable[[Path], Path], layers: int, batched: int, tmp_path: Path
) -> None:
    """Both have a routed scale of 2.5, which vLLM's runner would put on the shared part too."""
    model = make(tmp_path / "model")
    zeroed = checkpoints.without_shared(model, tmp_path / "zeroed")
    common = ("--skip-tokenizer-init", "--max-num-batched-tokens", str(batched), "--max-model-len", "256")
    stock = Server(model, tmp_path / "stock", "stock", common)
    folded = Server(model, tmp_path / "folded", "native", common)
    with _running(stock, folded):
        expected, found = stock.scores(PROMPTS), folded.scores(PROMPTS)
    with _running(Server(zeroed, tmp_path / "without", "native", common)) as (without,):
        negative = without.scores(PROMPTS)

    clear, same, total = _agreement(expected, found)
    worst = max(abs(p[0][0] - dict((t, s) for s, t in q).get(p[0][1], 0)) for a, b in zip(expected, found, strict=True)
                for p, q in zip(a, b, strict=True))  # fmt: skip
    print(f"{same}/{clear} clear positions of {total} agree, log probabilities within {worst:.1e}")
    assert clear > 0.7 * total
    assert same == clear
    changed_clear, changed_same, _ = _agreement(expected, negative)
    assert changed_same < 0.9 * changed_clear, "the shared expert does not matter to this checkpoint"

    assert f"foldmoe: folded {layers}/{layers} layers (native {layers}, slot 0), +0 B" in folded.log
    assert f"foldmoe: folded 0/{layers} layers" in stock.log
    assert stock.log.count("stock: FOLDMOE_FOLD=stock leaves") == layers
    assert (folded.state["arm"], stock.state["arm"]) == ("folded", "stock")
    assert folded.state["layers_folded"] == folded.state["layers_total"] == layers
    assert folded.state["complete"]
    assert folded.state["kv_blocks"] == stock.state["kv_blocks"] > 0
    assert stock.state["moe_bytes"] == 0 < folded.state["moe_bytes"]


def test_tiny_v4_keeps_its_score_in_vllms_own_model_code(tmp_path: Path) -> None:
    """MXFP4 routed and block-FP8 shared experts, hashed and scored layers, a routed scale of 1.5 in the weights."""
    environment = standins.install(tmp_path / "plugin")
    # Activations in float32: in bf16 both arms round 4e-3 away from each other in every layer, and the filler between
    # the needles has no likely next word, so that hardly a gap would be clear.
    common = f"--dtype float32 --max-model-len 1024 --max-num-seqs 1 --no-enable-prefix-caching --chat-template {CHAT}"
    arms = {
        fold: Server(TINY_V4, tmp_path / fold, fold, tuple(shlex.split(common)), environment)
        for fold in ("stock", "native")
    }
    asked = items.needle_items(ITEMS, 2026)
    with _running(*arms.values()):
        answers = {fold: [_answer(server, item.prompt) for item in asked] for fold, server in arms.items()}
        tokens = [arms["stock"].post("tokenize", {"prompt": item.prompt})["tokens"] for item in asked]
        scores = {fold: server.scores(tokens) for fold, server in arms.items()}
        chats = {fold: _chat(server, asked[0].prompt) for fold, server in arms.items()}
    right = {
        fold: sum(item.is_solved_by(text) for text, item in zip(said, asked, strict=True))
        for fold, said in answers.items()
    }
    clear, same, total = _agreement(scores["stock"], scores["native"])
    print(f"right answers {right} of {len(asked)}; {same}/{clear} clear positions of {total} agree")
    assert right["stock"] >= 0.9 * len(asked)
    assert right["native"] >= right["stock"] - 1
    assert same >= 0.995 * clear  # a value on the edge of two E4M3 numbers still falls to either side
    assert chats["stock"] == chats["native"] != ""
    assert "foldmoe: folded 5/5 layers (native 5, slot 0), +0 B" in arms["native"].log
    state = arms["native"].state
    assert {layer["routed"] for layer in state["layers"]} == {"16x128 mxfp4"}
    assert {layer["activations"] for layer in state["layers"]} == {"fp8"}


def _answer(server: Server, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 10, "temperature": 0}
    text: str = server.post("v1/completions", body)["choices"][0]["text"]
    return text


def _chat(server: Server, prompt: str) -> str:
    """A streamed answer, put together; it comes in several pieces."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 10, "temperature": 0}
    pieces = [event["choices"][0]["delta"].get("content") for event in server.stream("v1/chat/completions", body)]
    assert sum(bool(piece) for piece in pieces) > 1
    return "".join(piece for piece in pieces if piece)
