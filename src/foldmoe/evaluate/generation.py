"""Answers of a Transformers model in process: batches of prompts in, texts out, each with the reason why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foldmoe.evaluate.result import Finish


@dataclass(frozen=True)
class Generated:
    """One answer.

    Args:
        tokens: new token ids, the end token included.
        text: without special tokens, up to a stop string.
        finish: why it ended.
    """

    tokens: tuple[int, ...]
    text: str
    finish: Finish


@torch.inference_mode()
def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    token_limit: int,
    stop: Sequence[str] = (),
    batch: int = 50,
    special_tokens: bool = True,
    progress: Callable[[int], None] | None = None,
    **sampling: Any,
) -> list[Generated]:
    """Answer every prompt; a batch holds prompts of similar lengths, padded on the left.

    Args:
        token_limit: new tokens at most.
        stop: strings that end an answer.
        batch: prompts at a time.
        special_tokens: let the tokenizer add its own (a chat template has them already).
        progress: called with the prompts done since the last call.
        sampling: what ``model.generate`` takes; greedy without any.

    Raises:
        ValueError: a prompt that, with its answer, is longer than the model takes.
    """
    lengths = [len(ids) for ids in tokenizer(list(prompts), add_special_tokens=special_tokens).input_ids]
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest and lengths and max(lengths) + token_limit > longest:
        number = lengths.index(max(lengths))
        raise ValueError(
            f"prompt {number} has {lengths[number]} tokens; with {token_limit} new ones that is more than the "
            f"{longest} positions of the model. Nothing is truncated here: ask for fewer tokens or shorter items"
        )
    order = sorted(range(len(prompts)), key=lengths.__getitem__)
    answers: dict[int, Generated] = {}
    ends = _end_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    settings = {"do_sample": False, **sampling}
    if stop:
        settings |= {"stop_strings": list(stop), "tokenizer": tokenizer}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        inputs = tokenizer(
            [prompts[i] for i in chosen],
            return_tensors="pt",
            padding=len(chosen) > 1,
            padding_side="left",
            add_special_tokens=special_tokens,
        ).to(model.device)
        output = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=token_limit,
            pad_token_id=pad,
            **settings,
        )
        for i, row in zip(chosen, output[:, inputs.input_ids.shape[1] :].tolist(), strict=True):
            answers[i] = _read(row, tokenizer, ends, pad, stop)
        if progress:
            progress(len(chosen))
    return [answers[i] for i in range(len(prompts))]


def _read(row: list[int], tokenizer: Any, ends: set[int], pad: int, stop: Sequence[str]) -> Generated:
    """One row of ``model.generate``: what follows the end of a shorter answer is padding."""
    end = next((i for i, token in enumerate(row) if token in ends), None)
    if end is not None:
        row = row[: end + 1]
    text = tokenizer.decode(row, skip_special_tokens=True)
    stops = [at for at in (text.find(term) for term in stop if term) if at >= 0]
    if stops:
        while row and row[-1] == pad:
            row.pop()
    finish: Finish = "stop" if stops or end is not None else "length"
    return Generated(tuple(row), text[: min(stops)] if stops else text, finish)


def _end_tokens(model: Any, tokenizer: Any) -> set[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return {token for token in (*found, tokenizer.eos_token_id) if token is not None}
