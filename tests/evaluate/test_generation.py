"""Answers in process: why each one ended, in any order and batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from foldmoe.evaluate.skills import SKILLS, TINY_V4, ask, grouped_items
from foldmoe.planner import FusionPolicy

pytest.importorskip("transformers")

from foldmoe.evaluate.generation import generate


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    from transformers import AutoTokenizer

    from foldmoe.integrations.transformers import load

    return load(TINY_V4, FusionPolicy("native"), device="cpu", quiet=True), AutoTokenizer.from_pretrained(TINY_V4)


PROMPTS = [item.prompt for _, item in grouped_items("needle", 2)]  # the first cells have 128 tokens


def test_an_answer_that_ends_by_itself_stops_and_one_at_the_limit_was_cut(tiny: tuple[Any, Any]) -> None:
    ended = generate(*tiny, PROMPTS, token_limit=16)
    cut = generate(*tiny, PROMPTS, token_limit=3)
    assert [one.finish for one in ended] == ["stop", "stop"]
    assert [one.finish for one in cut] == ["length", "length"]
    assert [len(one.tokens) for one in cut] == [3, 3]
    for one, (_, item) in zip(ended, grouped_items("needle", 2), strict=True):
        assert one.text.strip() == item.answer


def test_a_stop_string_ends_an_answer_and_is_not_part_of_it(tiny: tuple[Any, Any]) -> None:
    whole = generate(*tiny, PROMPTS[:1], token_limit=16)[0]
    middle = whole.text.strip()[2]
    stopped = generate(*tiny, PROMPTS[:1], token_limit=16, stop=[middle])[0]
    assert stopped.finish == "stop"
    assert stopped.text == whole.text[: whole.text.index(middle)]


def test_batches_and_their_order_do_not_change_answers(tiny: tuple[Any, Any]) -> None:
    done: list[int] = []
    alone = generate(*tiny, PROMPTS, token_limit=8, batch=1, progress=done.append)
    assert done == [1, 1]
    assert generate(*tiny, PROMPTS[::-1], token_limit=8)[::-1] == alone


def test_a_prompt_that_does_not_fit_is_an_error_and_never_cut(tiny: tuple[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"prompt 1 has \d+ tokens; with 16 new ones that is more than the 1024"):
        generate(*tiny, [PROMPTS[0], "Text:" + " The cat sings." * 300], token_limit=16)


def test_a_skill_is_scored_with_both_filters(tiny: tuple[Any, Any]) -> None:
    found = ask(*tiny, "arithmetic", 2)
    assert found.metrics == ("strict-match", "flexible-extract")
    assert found.token_limit == SKILLS["arithmetic"].token_limit
    assert found.scores("strict-match") == found.scores("flexible-extract") == [1.0, 1.0]
    assert (found.cut, found.empty, found.past_end) == (0.0, 0.0, 0.0)
    short = ask(*tiny, "arithmetic", 2, token_limit=4)
    assert short.cut == 1.0
    assert short.score("strict-match") == 0.0
    assert short.score("strict-match", ended=True) is None


def test_generation_leaves_no_gradients(tiny: tuple[Any, Any]) -> None:
    generate(*tiny, PROMPTS[:1], token_limit=1)
    assert torch.is_grad_enabled()
