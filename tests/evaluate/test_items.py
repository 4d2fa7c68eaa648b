"""tiny-v4's questions: reproducible, held out, answerable, scored as they should be."""

from __future__ import annotations

import re

import pytest

from foldmoe.evaluate import items
from foldmoe.evaluate.items import Item
from foldmoe.evaluate.skills import evaluation_items, grouped_items


@pytest.mark.parametrize("task", ["needle", "arithmetic"])
def test_items_are_the_same_every_time_and_all_different(task: str) -> None:
    first, again = (evaluation_items(40)[task] for _ in range(2))
    assert first == again
    assert len({item.prompt for item in first}) == 40
    assert all(items.is_held_out(item.prompt) for item in first)


def test_needles_hold_their_key_once_in_256_to_512_tokens() -> None:
    for item in evaluation_items(30)["needle"]:
        assert item.prompt.count(f"The pass key is {item.answer}.") == 1
        assert 256 <= items.count_tokens(item.prompt + item.solution) + 2 <= 512


def test_word_problems_are_worked_out_right() -> None:
    for item in evaluation_items(60)["arithmetic"]:
        steps = re.findall(r"(\d+) ([-+*]) (\d+) = (\d+)\.", item.solution)
        assert len(steps) == 2
        for a, sign, b, result in steps:
            assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == int(result)
            assert 0 <= int(result) <= 99
        assert item.solution.endswith(f"#### {item.answer}")
        assert steps[-1][-1] == item.answer


@pytest.mark.parametrize(
    ("completion", "solved"),
    [(" 4 + 8 = 12.\n#### 12", True), ("#### 13", False), ("12", False), ("#### 12 and more", True), ("", False)],
)
def test_word_problems_count_what_follows_the_mark(completion: str, solved: bool) -> None:
    assert Item("?", "12", " 4 + 8 = 12.\n#### 12").is_solved_by(completion) is solved


@pytest.mark.parametrize(("completion", "solved"), [(" 40912", True), ("40912 it is", True), (" 4091", False)])
def test_needles_count_the_first_number(completion: str, solved: bool) -> None:
    assert Item("?", "40912", " 40912").is_solved_by(completion) is solved


def test_the_grid_asks_every_length_and_depth_before_any_twice() -> None:
    found = items.needle_grid(40, 2026)
    cells = [cell for cell, _ in found]
    assert len(set(cells[:20])) == 20
    assert cells[:20] == cells[20:]
    assert found[:7] == items.needle_grid(7, 2026)
    assert len({item.prompt for _, item in found}) == 40


@pytest.mark.parametrize("task", ["needle", "arithmetic"])
def test_a_seed_has_items_of_its_own_and_the_usual_ones_are_those_of_2026(task: str) -> None:
    usual, other = grouped_items(task, 20), grouped_items(task, 20, 7)
    assert usual == grouped_items(task, 20, 2026)
    assert not {item.prompt for _, item in usual} & {item.prompt for _, item in other}
    assert [cell for cell, _ in usual] == [cell for cell, _ in other]
    assert all(items.is_held_out(item.prompt) for _, item in other)


def test_the_grid_puts_the_key_where_it_says() -> None:
    for cell, item in items.needle_grid(20, 2026):
        length, depth = re.findall(r"\d+", cell)
        assert items.count_tokens(item.prompt + item.solution) + 2 <= int(length)
        sentences = [part for part in re.split(r"(?<=\.)", item.prompt.removeprefix("Text:")) if "?" not in part]
        at = next(i for i, sentence in enumerate(sentences) if "pass key is" in sentence)
        assert at == round(int(depth) / 100 * (len(sentences) - 1))
        assert items.is_held_out(item.prompt)
