# SPDX-License-Identifier: Apache-2.0
"""Training batches: documents of three kinds packed into rows of one fixed length.

A batch depends on (seed, step, total steps) only, so any number of worker processes gives the same
stream. Rows have one shape throughout, which lets the training step be compiled once: the length
curriculum is in the documents, and attention never crosses from one document into the next.
"""

import random
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from tokenizer import BOS_ID, EOS_ID, build_tokenizer, piece_ids
from torch.utils.data import DataLoader, Dataset

from foldmoe.evaluate import items


class Kind(IntEnum):
    """What a token is to the loss, as the token to be predicted."""

    IGNORED = 0
    CONTEXT = 1
    ENGLISH = 2
    NEEDLE_ANSWER = 3
    ARITHMETIC_ANSWER = 4


# Answers carry the loss. A long needle row has six answer tokens, an arithmetic row about 150.
LOSS_WEIGHTS = {Kind.IGNORED: 0.0, Kind.CONTEXT: 0.05, Kind.ENGLISH: 0.1, Kind.NEEDLE_ANSWER: 4.0,
                Kind.ARITHMETIC_ANSWER: 1.0}


@dataclass(frozen=True)
class Curriculum:
    """Which documents a training run shows, as a function of its progress in 0..1."""

    row_length: int = 512
    first_needle: int = 40  # longest pass-key text at the start, in tokens
    grown_at: float = 0.4  # progress at which texts reach the row length
    limit: int = 99  # largest number in the word problems
    needle_share: float = 0.45  # of the tokens
    arithmetic_share: float = 0.45

    def needle_tokens(self, rng: random.Random, progress: float) -> int:
        grown = min(1.0, progress / self.grown_at)
        longest = int(self.first_needle * (self.row_length / self.first_needle) ** grown)
        # Short texts never disappear: copying over a short distance is what the long ones build on.
        shortest = self.first_needle if rng.random() < 0.2 else max(self.first_needle, longest // 2)
        return rng.randint(shortest, longest)


class Documents:
    """Makes encoded documents: (token ids, kinds), begin and end marks included."""

    def __init__(self, curriculum: Curriculum):
        self.curriculum = curriculum
        self.ids = piece_ids(build_tokenizer())

    def encode(self, text: str) -> list[int]:
        ids = self.ids
        return [ids[piece] for piece in items.PIECE.findall(text)]

    def from_item(self, item: items.Item, answer_kind: Kind) -> tuple[list[int], list[int]]:
        prompt, solution = self.encode(item.prompt), self.encode(item.solution)
        kinds = [Kind.IGNORED, *[Kind.CONTEXT] * len(prompt), *[answer_kind] * (len(solution) + 1)]
        return [BOS_ID, *prompt, *solution, EOS_ID], kinds

    def for_training(self, make) -> items.Item:
        while True:
            item = make()
            if not items.is_held_out(item.prompt):
                return item

    def english(self, rng: random.Random, length: int) -> tuple[list[int], list[int]]:
        """Plain sentences, cut off at `length` so that they also fill a row up."""
        tokens = [BOS_ID]
        while len(tokens) < length:
            tokens += self.encode(items.filler_sentence(rng))
        return tokens[:length], [Kind.IGNORED, *[Kind.ENGLISH] * (length - 1)]

    def row(self, rng: random.Random, progress: float) -> list[tuple[list[int], list[int]]]:
        plan, left, documents = self.curriculum, self.curriculum.row_length, []
        # One draw for the whole row: a long pass-key text takes a row of its own.
        draw = rng.random()
        while left >= 80:
            if draw < plan.needle_share:
                tokens = min(plan.needle_tokens(rng, progress), left)
                item = self.for_training(lambda length=tokens: items.needle(rng, length))
                document = self.from_item(item, Kind.NEEDLE_ANSWER)
            elif draw < plan.needle_share + plan.arithmetic_share:
                item = self.for_training(lambda: items.arithmetic(rng, plan.limit))
                document = self.from_item(item, Kind.ARITHMETIC_ANSWER)
            else:
                document = self.english(rng, min(rng.randint(40, 200), left))
            documents.append(document)
            left -= len(document[0])
        if left > 1:
            documents.append(self.english(rng, left))
        return documents


def pack(rows: list[list[tuple[list[int], list[int]]]], row_length: int) -> dict[str, torch.Tensor]:
    """Rows of documents as tensors [rows, row_length]: tokens, kinds, and a document number for attention."""
    shape = (len(rows), row_length)
    tokens, kinds, documents = np.zeros(shape, np.int16), np.zeros(shape, np.uint8), np.full(shape, -1, np.int16)
    for r, row in enumerate(rows):
        start = 0
        for number, (ids, what) in enumerate(row):
            end = start + len(ids)
            tokens[r, start:end], kinds[r, start:end], documents[r, start:end] = ids, what, number
            start = end
    return {name: torch.from_numpy(array)
            for name, array in (("tokens", tokens), ("kinds", kinds), ("documents", documents))}


class TrainingBatches(Dataset):
    def __init__(self, curriculum: Curriculum, rows: int, steps: int, seed: int):
        self.documents, self.rows, self.steps, self.seed = Documents(curriculum), rows, steps, seed

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> dict[str, torch.Tensor]:
        rng = random.Random(f"tiny-v4/{self.seed}/{step}")
        rows = [self.documents.row(rng, step / self.steps) for _ in range(self.rows)]
        return pack(rows, self.documents.curriculum.row_length)


def training_loader(batches: TrainingBatches, workers: int, pin: bool) -> DataLoader:
    ahead = {"prefetch_factor": 4, "persistent_workers": True} if workers else {}
    return DataLoader(batches, batch_size=None, shuffle=False, num_workers=workers, pin_memory=pin, **ahead)


def held_out_batch(curriculum: Curriculum, count: int, seed: int) -> dict[str, torch.Tensor]:
    """`count` held-out items of each task, packed for teacher-forced scoring."""
    documents, length = Documents(curriculum), curriculum.row_length
    rows = [[documents.from_item(item, Kind.NEEDLE_ANSWER)]
            for item in items.needle_items(count, seed, shortest=length // 2, longest=length)]
    problems = [documents.from_item(item, Kind.ARITHMETIC_ANSWER)
                for item in items.arithmetic_items(count, seed, limit=curriculum.limit)]
    per_row = length // 80
    rows += [problems[i:i + per_row] for i in range(0, count, per_row)]
    return pack(rows, length)
