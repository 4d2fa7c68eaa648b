"""tiny-v4's skills, needle and arithmetic, scored by greedy decoding in process.

The same items, patterns and limits as the lm-eval tasks ``foldmoe_needle`` and ``foldmoe_arithmetic``
(``foldmoe/evaluate/tasks``), for an installation without lm-eval.
"""

from __future__ import annotations

import hashlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foldmoe.evaluate import items
from foldmoe.evaluate.generation import generate
from foldmoe.evaluate.request import SEED
from foldmoe.evaluate.result import Sample, TaskResult

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foldmoe.evaluate.items import Item

TINY_V4 = Path(__file__).parents[1] / "assets" / "tiny-v4"
"""The trained checkpoint in DeepSeek-V4's stored format that comes with the package."""

LONGEST_ANSWER = {"needle": 10, "arithmetic": 36}
"""Tokens; a little more than the longest right answer needs."""


@dataclass(frozen=True)
class TaskAnswers:
    """What a model said to one task's items.

    Args:
        tokens: new token ids, one list an item, in the order of the items.
        texts: the same as text.
        solved: which of them are right.
    """

    items: tuple[Item, ...]
    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    solved: tuple[bool, ...]

    @property
    def score(self) -> float:
        return sum(self.solved) / len(self.solved) if self.solved else 0.0

    @property
    def generated(self) -> int:
        """New tokens over all items."""
        return sum(map(len, self.tokens))


def evaluation_items(count: int) -> dict[str, list[Item]]:
    """``count`` held-out items a task, always the same ones: pass keys in 256 to 512 tokens, two-step problems."""
    return {
        "needle": items.needle_items(count, SEED),
        "arithmetic": items.arithmetic_items(count, SEED),
    }


def answer(
    model: Any,
    tokenizer: Any,
    asked: Sequence[Item],
    longest: int,
    *,
    batch: int = 50,
    progress: Callable[[int], None] | None = None,
) -> TaskAnswers:
    """Greedy answers to ``asked``; a batch holds prompts of similar lengths, padded on the left."""
    prompts = [item.prompt for item in asked]
    said = generate(model, tokenizer, prompts, token_limit=longest, batch=batch, progress=progress)
    texts = tuple(one.text for one in said)
    solved = tuple(item.is_solved_by(text) for item, text in zip(asked, texts, strict=True))
    return TaskAnswers(tuple(asked), tuple(one.tokens for one in said), texts, solved)


@dataclass(frozen=True)
class Skill:
    """A task without lm-eval.

    Args:
        strict: matches the final answer in its proper place; the first match counts.
        flexible: matches anything that could be an answer; the last match counts.
        token_limit: of an answer; the longest right one and room to run past its end.
    """

    strict: str
    flexible: str
    token_limit: int

    def scores(self, text: str, gold: str) -> dict[str, float]:
        """1 or 0 by filter."""
        strict, flexible = re.search(self.strict, text), re.findall(self.flexible, text)
        return {
            "strict-match": float(strict is not None and strict[1] == gold),
            "flexible-extract": float(bool(flexible) and flexible[-1] == gold),
        }


SKILLS = {
    "needle": Skill(r"\A\s*(\d+)", r"\d+", 16),
    "arithmetic": Skill(r"####\s*(\d+)", r"\d+", 48),
}


def grouped_items(task: str, count: int, seed: int = SEED) -> list[tuple[str, Item]]:
    """``count`` items of a skill with the part of the task that they belong to: the needle's length and depth."""
    if task == "needle":
        return items.needle_grid(count, seed)
    return [("", item) for item in items.arithmetic_items(count, seed)]


def runs_past_end(text: str, strict: str, which: int = 0) -> bool:
    """True where text follows the final answer, the match of ``strict`` that counts; full stops and space do not."""
    found = list(re.finditer(strict, text))
    return bool(found) and bool(text[found[which].end() :].strip(" \t\r\n."))


def ask(
    model: Any,
    tokenizer: Any,
    task: str,
    count: int,
    *,
    seed: int = SEED,
    token_limit: int | None = None,
    batch: int = 50,
    progress: Callable[[int], None] | None = None,
) -> TaskResult:
    """Greedy answers to ``count`` items of a skill, those of ``seed``, scored with both filters."""
    skill, asked = SKILLS[task], grouped_items(task, count, seed)
    limit = token_limit or skill.token_limit
    start = time.perf_counter()
    prompts = [item.prompt for _, item in asked]
    said = generate(model, tokenizer, prompts, token_limit=limit, batch=batch, progress=progress)
    samples = tuple(
        Sample(
            id=number,
            prompt_hash=hashlib.sha256(item.prompt.encode()).hexdigest(),
            scores=skill.scores(one.text, item.answer),
            text=one.text,
            finish=one.finish,
            tokens=len(one.tokens),
            past_end=runs_past_end(one.text, skill.strict),
            group=group,
        )
        for number, ((group, item), one) in enumerate(zip(asked, said, strict=True))
    )
    return TaskResult(samples, "1", limit, 0, {"do_sample": False}, time.perf_counter() - start)
