"""tiny-v4's skills, needle and arithmetic, scored by greedy decoding in process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foldmoe.evaluate import items

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foldmoe.evaluate.items import Item

SEED = 2026
LONGEST_ANSWER = {"needle": 10, "arithmetic": 36}
"""Tokens; a little more than the longest right answer needs."""


@dataclass(frozen=True)
class TaskAnswers:
    """What a model said to one task's items.

    Args:
        tokens: new token ids, one list an item, in the order of the items.
        texts: the same as text.
        solved: which of them are right.
        seconds: spent generating.
    """

    items: tuple[Item, ...]
    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    solved: tuple[bool, ...]
    seconds: float

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


@torch.inference_mode()
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
    order = sorted(range(len(asked)), key=lambda i: len(asked[i].prompt))
    tokens: list[tuple[int, ...]] = [()] * len(asked)
    start_time = time.perf_counter()
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        prompts = [asked[i].prompt for i in chosen]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left").to(model.device)
        output = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            do_sample=False,
            max_new_tokens=longest,
            pad_token_id=tokenizer.pad_token_id,
        )
        for i, row in zip(chosen, output[:, inputs.input_ids.shape[1] :].tolist(), strict=True):
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
            tokens[i] = tuple(row[:end])
        if progress:
            progress(len(chosen))
    seconds = time.perf_counter() - start_time
    texts = tuple(tokenizer.decode(row, skip_special_tokens=True) for row in tokens)
    solved = tuple(item.is_solved_by(text) for item, text in zip(asked, texts, strict=True))
    return TaskAnswers(tuple(asked), tuple(tokens), texts, solved, seconds)
