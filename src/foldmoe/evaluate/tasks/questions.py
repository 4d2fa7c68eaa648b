"""Data of the tasks beside this file, as lm-eval asks for it."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import datasets

from foldmoe.evaluate import skills
from foldmoe.evaluate.request import SEED

ITEMS = 200

_CHOICES = (
    "Answer the following multiple choice question. Think first. The last line of your reply must be exactly "
    "'Answer: LETTER', where LETTER is one of {letters}.\n\n{question}\n\n{choices}"
)


def _own(task: str, *, seed: int = SEED, **_: Any) -> dict[str, Any]:
    """``seed`` is in lm-eval's ``--metadata``, or the request's."""
    docs = [
        {"prompt": item.prompt, "answer": item.answer, "group": group}
        for group, item in skills.grouped_items(task, ITEMS, seed)
    ]
    return {"test": datasets.Dataset.from_list(docs)}


def needle(**metadata: Any) -> dict[str, Any]:
    return _own("needle", **metadata)


def arithmetic(**metadata: Any) -> dict[str, Any]:
    return _own("arithmetic", **metadata)


def multiple_choice(question: str, right: str, wrong: list[str]) -> dict[str, str]:
    """The prompt and the right letter; the order of the choices depends on the question alone."""
    choices = [right, *wrong]
    order = list(range(len(choices)))
    random.Random(hashlib.sha256(question.encode()).digest()).shuffle(order)
    letters = "ABCDEFGHIJ"[: len(choices)]
    lines = [f"{letter}) {choices[i]}" for letter, i in zip(letters, order, strict=True)]
    prompt = _CHOICES.format(letters=", ".join(letters), question=question, choices="\n".join(lines))
    return {"prompt": prompt, "answer": letters[order.index(0)]}


def shuffled_gpqa(dataset: Any) -> Any:
    return dataset.map(
        lambda doc: multiple_choice(
            doc["Question"].strip(),
            doc["Correct Answer"].strip(),
            [doc[f"Incorrect Answer {number}"].strip() for number in (1, 2, 3)],
        )
    )


def shuffled_mmlu_pro(dataset: Any) -> Any:
    def ask(doc: dict[str, Any]) -> dict[str, str]:
        options = [option.strip() for option in doc["options"]]
        right = options.pop(doc["answer_index"])
        return multiple_choice(doc["question"].strip(), right, options)

    return dataset.map(ask)
