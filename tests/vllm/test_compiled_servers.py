"""Real vLLM servers on this CPU whose models run under ``torch.compile``, stock and folded (``-m slow``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm import checkpoints
from tests.vllm.agreement import PROMPTS, agreement, greedy, running
from tests.vllm.server import Server

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_compiled_model_folds_and_names_the_same_tokens_as_stock(tmp_path: Path) -> None:
    """The folded layer is one op of the compiled graph; the shared expert's modules are in none."""
    model = checkpoints.glm(tmp_path / "model")
    zeroed = checkpoints.without_shared(model, tmp_path / "zeroed")
    common = ("--skip-tokenizer-init", "--max-num-batched-tokens", "2048", "--max-model-len", "256")
    kept = {"VLLM_CACHE_ROOT": str(tmp_path / "cache")}  # of this run alone: both are compiled here
    stock = Server(model, tmp_path / "stock", "stock", common, kept, compiled=True)
    folded = Server(model, tmp_path / "folded", "native", common, kept, compiled=True)
    with running(stock, folded):
        expected, found = stock.scores(PROMPTS), folded.scores(PROMPTS)
        said = greedy(folded, PROMPTS[:1])
    assert "foldmoe: folded 1/1 layers (native 1, slot 0)" in folded.log
    assert folded.state["arm"] == "folded"
    assert len([*(tmp_path / "cache").glob("torch_compile_cache/**/model")]) == 2, "one compiled model a server"
    clear, same, positions = agreement(expected, found)
    print(f"{same} of {clear} clear positions of {positions} agree; folded says {said[0]}")
    assert same == clear > 200
    with running(Server(zeroed, tmp_path / "without", "native", common, kept, compiled=True)) as (without,):
        clear, same, _ = agreement(expected, without.scores(PROMPTS))
    assert same < 0.9 * clear, "the shared expert does not matter here"
