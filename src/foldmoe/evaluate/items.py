# SPDX-License-Identifier: Apache-2.0
"""The texts of tiny-v4: evaluation items, and the generators that training shares with them.

Pure standard library. Every text comes from the small grammar below, written for this model, so there
is no third-party text in it. Training and evaluation never share a text: a hash of the prompt decides
which side may use it (`is_held_out`).
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

NEEDLE_LENGTHS = (128, 256, 384, 512)
NEEDLE_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

# The tokenizer cuts text exactly here, and every piece that the grammar makes is one token.
PIECE = re.compile(r" ?[A-Za-z]+|\d| ?[^\sA-Za-z\d]+|\s")

LONGEST_SENTENCE = 10  # tokens
HELD_OUT_MODULUS = 8  # one text in eight belongs to the evaluation side

NAMES = {
    "Anna": "she",
    "Ben": "he",
    "Clara": "she",
    "David": "he",
    "Emma": "she",
    "Felix": "he",
    "Grace": "she",
    "Hugo": "he",
    "Iris": "she",
    "Jack": "he",
    "Lena": "she",
    "Max": "he",
}
GOODS = (
    "apples",
    "books",
    "pears",
    "coins",
    "stamps",
    "shells",
    "cards",
    "pencils",
    "stones",
    "cakes",
    "eggs",
    "roses",
)
BOXES = ("bags", "boxes", "baskets", "jars")
GAINS = ("buys {n} more", "finds {n} more", "gets {n} from {friend}", "wins {n} more")
LOSSES = ("sells {n}", "loses {n}", "gives {n} to {friend}", "drops {n}")

ADJECTIVES = (
    "old",
    "small",
    "quiet",
    "bright",
    "green",
    "tall",
    "warm",
    "slow",
    "clever",
    "round",
    "heavy",
    "soft",
    "young",
    "brown",
    "white",
    "empty",
)
NOUNS = (
    "cat",
    "dog",
    "bird",
    "horse",
    "farmer",
    "teacher",
    "child",
    "river",
    "boat",
    "train",
    "lamp",
    "chair",
    "door",
    "letter",
    "song",
    "cloud",
    "tree",
    "flower",
)
PLACES = (
    "house",
    "garden",
    "village",
    "forest",
    "bridge",
    "market",
    "school",
    "hill",
    "station",
    "lake",
    "kitchen",
    "field",
)
VERBS = ("waits", "rests", "sings", "sleeps", "moves", "stays", "turns", "walks", "stands", "plays")
DEEDS = ("sees", "likes", "paints", "remembers", "hears", "draws", "follows", "watches")
PREPOSITIONS = ("near", "behind", "under", "above", "beside", "inside")
TIMES = ("today", "again", "every morning", "at night", "in spring", "for a while", "after lunch", "all day")


@dataclass(frozen=True)
class Item:
    """A question with its answer; `solution` is the whole text a model should continue `prompt` with."""

    prompt: str
    answer: str
    solution: str

    def is_solved_by(self, completion: str) -> bool:
        """True where the completion gives the answer: after `####` if the solution has one, else at its start."""
        if "####" in self.solution:
            found = re.search(r"####\s*(\d+)", completion)
            return found is not None and found.group(1) == self.answer
        found = re.match(r"\s*(\d+)", completion)
        return found is not None and found.group(1) == self.answer


def count_tokens(text: str) -> int:
    return len(PIECE.findall(text))


def is_held_out(prompt: str) -> bool:
    digest = hashlib.blake2b(prompt.encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_MODULUS == 0


def filler_sentence(rng: random.Random) -> str:
    pick = rng.choice
    shape = rng.random()
    if shape < 0.4:
        return f" The {pick(ADJECTIVES)} {pick(NOUNS)} {pick(VERBS)} {pick(PREPOSITIONS)} the {pick(PLACES)}."
    if shape < 0.7:
        return f" {pick(tuple(NAMES))} {pick(DEEDS)} the {pick(ADJECTIVES)} {pick(NOUNS)} {pick(TIMES)}."
    if shape < 0.85:
        return f" A {pick(NOUNS)} and a {pick(NOUNS)} {pick(VERBS[:2])[:-1]} in the {pick(PLACES)}."
    return f" In the {pick(PLACES)} {pick(tuple(NAMES))} {pick(DEEDS)} a {pick(NOUNS)}."


def filler(rng: random.Random, tokens: int) -> list[str]:
    """Sentences of at most `tokens` tokens together, and as many as fit closely."""
    sentences, left = [], tokens
    while left >= LONGEST_SENTENCE:
        sentence = filler_sentence(rng)
        left -= count_tokens(sentence)
        sentences.append(sentence)
    return sentences


def needle(rng: random.Random, tokens: int, digits: int = 5, depth: float | None = None) -> Item:
    """A pass key hidden at `depth`, 0 (first) to 1 (last sentence) or random.

    Prompt, answer, begin and end marks are at most `tokens` tokens together.
    """
    key = "".join(rng.choice("0123456789") for _ in range(digits))
    statement = f" The pass key is {key}."
    question = " What is the pass key?\nAnswer:"
    frame = count_tokens("Text:" + statement + question) + 1 + digits + 2
    sentences = filler(rng, tokens - frame)
    at = rng.randint(0, len(sentences)) if depth is None else round(depth * len(sentences))
    sentences.insert(at, statement)
    return Item("Text:" + "".join(sentences) + question, key, " " + key)


def arithmetic(rng: random.Random, limit: int = 99) -> Item:
    """A word problem of two steps, every number in 0..limit, the steps written out."""
    name, friend = rng.sample(tuple(NAMES), 2)
    pronoun, goods = NAMES[name], rng.choice(GOODS)
    steps, total = [], 0
    if rng.random() < 0.25:
        most = min(9, int(limit**0.5))
        a, b = rng.randint(2, most), rng.randint(2, most)
        total = a * b
        story = f" {name} has {a} {rng.choice(BOXES)} with {b} {goods} each."
        steps.append(f" {a} * {b} = {total}.")
    else:
        total = rng.randint(1, limit)
        story = f" {name} has {total} {goods}."
    while len(steps) < 2:
        gains = rng.random() < 0.5 if 0 < total < limit else total == 0
        amount = rng.randint(1, limit - total if gains else total)
        deed = rng.choice(GAINS if gains else LOSSES).format(n=amount, friend=friend)
        subject = pronoun.capitalize() if not steps else f"Then {pronoun}"
        story += f" {subject} {deed}."
        after = total + amount if gains else total - amount
        steps.append(f" {total} {'+' if gains else '-'} {amount} = {after}.")
        total = after
    prompt = f"Question:{story} How many {goods} does {name} have now?\nAnswer:"
    return Item(prompt, str(total), "".join(steps) + f"\n#### {total}")


def held_out(make: Callable[[random.Random], Item], n: int, seed: int) -> list[Item]:
    """`n` different items of the evaluation side."""
    rng, found, seen = random.Random(seed), list[Item](), set[str]()
    while len(found) < n:
        item = make(rng)
        if is_held_out(item.prompt) and item.prompt not in seen:
            seen.add(item.prompt)
            found.append(item)
    return found


def needle_items(n: int, seed: int, *, shortest: int = 256, longest: int = 512) -> list[Item]:
    """`n` held-out pass-key items of `shortest` to `longest` tokens."""
    # `filler` falls short of what it was asked for by less than one sentence.
    lowest = min(shortest + LONGEST_SENTENCE - 1, longest)
    return held_out(lambda rng: needle(rng, rng.randint(lowest, longest)), n, seed)


def needle_grid(
    n: int, seed: int, *, lengths: tuple[int, ...] = NEEDLE_LENGTHS, depths: tuple[float, ...] = NEEDLE_DEPTHS
) -> list[tuple[str, Item]]:
    """`n` held-out pass-key items with their cell, "length at depth"; every cell gets its turn before any gets two."""
    cells = [(length, depth) for length in lengths for depth in depths]
    turns = -(-n // len(cells))
    made = [
        held_out(lambda rng, t=length, d=depth: needle(rng, t, depth=d), turns, seed + cell)  # type: ignore[misc]
        for cell, (length, depth) in enumerate(cells)
    ]
    labels = [f"{length} tokens at {depth:.0%}" for length, depth in cells]
    return [(label, found[turn]) for turn in range(turns) for label, found in zip(labels, made, strict=True)][:n]


def arithmetic_items(n: int, seed: int, *, limit: int = 99) -> list[Item]:
    """`n` held-out two-step word problems with every number in 0..limit."""
    return held_out(lambda rng: arithmetic(rng, limit), n, seed)
