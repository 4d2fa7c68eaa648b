"""Real servers of two ranks, experts spread over them or each cut in two, on this CPU; ``-m slow`` runs these.

vLLM's CPU groups lack the exchange of uneven rows, which ``standin_groups`` adds. Its own CPU experts read past their
weights with expert parallelism (``cpu_fused_moe`` takes no expert map), so the stock side is a server of one rank.
"""

from __future__ import annotations

import random
import shlex
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import pytest

from foldmoe.evaluate import items
from foldmoe.evaluate.skills import TINY_V4
from tests.vllm import checkpoints, standins
from tests.vllm.agreement import EDGE, PROMPTS, Scores, agreement, gaps_of_differing, running
from tests.vllm.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

DATA_PARALLEL = ("--data-parallel-size", "2", "--enable-expert-parallel", "--api-server-count", "1")
TENSOR_PARALLEL = ("--tensor-parallel-size", "2", "--enable-expert-parallel")
SPLIT_EXPERTS = ("--tensor-parallel-size", "2")


def _uneven(server: Server, prompts: list[list[int]]) -> Scores:
    """Rank 0 answers all but the last prompt while rank 1 answers that one; the other is idle before and after."""
    with ThreadPoolExecutor(2) as pool:
        many = pool.submit(server.scores, prompts[:-1], rank=0)
        one = pool.submit(server.scores, prompts[-1:], rank=1)
        found = many.result() + one.result()
    again = server.scores(prompts[:1], rank=1)
    assert agreement(found[:1], again)[0] == agreement(found[:1], again)[1], "a prompt is answered alike by both ranks"
    return found


def _loaded_alike(server: Server, layers: int, words: str, names: tuple[str, str]) -> None:
    """Each rank's log line and state file, and one digest."""
    line = f"foldmoe: folded {layers}/{layers} layers ({words})"
    for name in names:
        assert any(name in row and line in row for row in server.log.splitlines()), f"{name} logged no {line!r}"
    states = [server.state_of(rank) for rank in (0, 1)]
    assert [(state["rank"], state["world_size"], state["complete"]) for state in states] == [(0, 2, True), (1, 2, True)]
    assert states[0]["digest"] == states[1]["digest"]
    assert states[0]["moe_bytes"] == states[1]["moe_bytes"] > 0


@pytest.mark.parametrize(
    ("make", "how", "worker"),
    [
        (checkpoints.glm, DATA_PARALLEL, "Worker_DP{0}_EP{0}"),
        (partial(checkpoints.glm, top_k=8), TENSOR_PARALLEL, "Worker_TP{0}_EP{0}"),
        (partial(checkpoints.qwen, top_k=8), SPLIT_EXPERTS, "Worker_TP{0}"),
    ],
    ids=["glm-data", "glm-tensor", "qwen-split"],
)
def test_two_ranks_name_the_same_tokens_as_stock(
    make: Callable[[Path], Path], how: tuple[str, ...], worker: str, tmp_path: Path
) -> None:
    """GLM in bf16, a routed scale of 2.5; Qwen with a gate of the shared expert, every expert cut in two.

    Without their shared experts both answer otherwise.
    """
    model = make(tmp_path / "model")
    zeroed = checkpoints.without_shared(model, tmp_path / "zeroed")
    environment = standins.install(tmp_path / "plugin", "standin_groups")
    data = how is DATA_PARALLEL
    batched = "8192" if data else "512"  # gathered, a step has as many rows of each rank
    common = ("--skip-tokenizer-init", "--max-num-batched-tokens", batched, "--max-model-len", "256")
    stock = Server(model, tmp_path / "stock", "stock", common)
    folded = Server(model, tmp_path / "folded", "native", (*common, *how), environment)
    with running(stock, folded):
        expected = stock.scores(PROMPTS)
        found = _uneven(folded, PROMPTS) if data else folded.scores(PROMPTS)
    with running(Server(zeroed, tmp_path / "without", "native", (*common, *how), environment)) as (without,):
        negative = without.scores(PROMPTS)
    clear, same, total = agreement(expected, found)
    changed_clear, changed_same, _ = agreement(expected, negative)
    print(f"{same}/{clear} clear positions of {total} agree; without the shared expert {changed_same}/{changed_clear}")
    assert clear > 0.7 * total
    assert same == clear
    assert changed_same < 0.9 * changed_clear, "the shared expert does not matter to this checkpoint"
    _loaded_alike(folded, 1, "native 1, slot 0", (worker.format(0), worker.format(1)))


def test_a_step_of_eight_thousand_rows_on_each_of_two_ranks(tmp_path: Path) -> None:
    """Both ranks get a long prompt at once; each reads its own in one step of ``--max-num-batched-tokens 8192``."""
    length = 8000
    model = checkpoints.glm(tmp_path / "model", positions=8192)
    environment = standins.install(tmp_path / "plugin", "standin_groups")
    common = ("--skip-tokenizer-init", "--max-num-batched-tokens", "8192", "--max-model-len", "8192")
    stock = Server(model, tmp_path / "stock", "stock", common)
    folded = Server(model, tmp_path / "folded", "native", (*common, *DATA_PARALLEL), environment)
    draw = random.Random(7)
    prompts = [[draw.randrange(3, 512) for _ in range(length)] for _ in range(2)]
    with running(stock, folded):
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(folded.scores, [prompt], 2, rank) for rank, prompt in enumerate(prompts)]
            found = [scores for answer in asked for scores in answer.result()]
        longest = folded.metric("vllm:iteration_tokens_total_sum") / folded.metric("vllm:iteration_tokens_total_count")
        expected = stock.scores(prompts, top=2)
    clear, same, total = agreement(expected, found)
    print(f"{longest:.0f} tokens a step; {same}/{clear} clear positions of {total} agree")
    assert longest >= length
    assert total == 2 * (length - 1)
    assert clear > 0.7 * total
    assert same == clear
    _loaded_alike(folded, 1, "native 1, slot 0", ("Worker_DP0_EP0", "Worker_DP1_EP1"))


@pytest.mark.parametrize("fold", ["native", "slot"])
def test_tiny_v4_over_two_data_parallel_ranks(fold: str, tmp_path: Path) -> None:
    """MXFP4 routed experts, 8 a rank, hashed layers among them; the slot fold lowers the FP8 shared expert to MXFP4.

    Two ranks say what one says: native that of vLLM's stock layers, the slot fold that of a slot on one rank, whose
    shared expert lost the same precision. Either finds the needles.
    """
    single = standins.install(tmp_path / "single", "standins")
    both = standins.install(tmp_path / "both", "standins", "standin_groups")
    lowered = {"FOLDMOE_ALLOW_REQUANTIZE": "1"} if fold == "slot" else {}
    common = shlex.split("--dtype float32 --max-model-len 1024 --max-num-seqs 1 --no-enable-prefix-caching")
    common += shlex.split("--tokenizer-mode hf")
    one = Server(TINY_V4, tmp_path / "one", "stock" if fold == "native" else fold, tuple(common), {**single, **lowered})
    two = Server(TINY_V4, tmp_path / "two", fold, (*common, *DATA_PARALLEL), {**both, **lowered})
    asked = items.needle_items(6, 2026)
    with running(one, two):
        tokens = [one.post("tokenize", {"prompt": item.prompt})["tokens"] for item in asked]
        expected, found = one.scores(tokens), _uneven(two, tokens)
        body = {"max_tokens": 10, "temperature": 0}
        texts = [
            two.post("v1/completions", {"prompt": item.prompt, **body}, rank=number % 2)["choices"][0]["text"]
            for number, item in enumerate(asked)
        ]
    right = sum(item.is_solved_by(text) for text, item in zip(texts, asked, strict=True))
    clear, same, total = agreement(expected, found)
    gaps = gaps_of_differing(expected, found)
    print(f"{fold}: {right} of {len(asked)} needles; {same}/{clear} clear positions of {total} agree with one rank")
    print("gaps where they differ:", *(f"{gap:.3f}" for gap in gaps))
    assert right >= len(asked) - 1
    assert len(gaps) == clear - same <= 0.005 * clear
    assert max(gaps, default=0) <= EDGE
    counts = "native 5, slot 0" if fold == "native" else "native 0, slot 5"
    _loaded_alike(two, 5, counts, ("Worker_DP0_EP0", "Worker_DP1_EP1"))
    state = two.state_of(1)
    assert state["extra_bytes"] == (0 if fold == "native" else -230_430)
    # Packed layers hold what was planned; that the FP8 tensors are freed: test_a_lowered_shared_expert_is_freed.
    assert state["moe_bytes"] == sum(layer["bytes_after"] for layer in state["layers"])
