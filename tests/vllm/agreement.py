"""Two servers over the same prompts: do they name the same likeliest tokens?"""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.server import Server

GAP = 1e-2
"""Positions whose two likeliest tokens lie closer than this may swap them for a rounding."""

EDGE = 0.05
"""Quantised values on the edge of two E4M3 numbers fall to either: where tokens differ, they lie closer than this."""

PROMPTS = [random.Random(seed).choices(range(3, 512), k=48) for seed in range(6)]

Scores = list[list[list[tuple[float, int]]]]


@contextmanager
def running(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """All of them, started side by side."""
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.stop()


def greedy(server: Server, prompts: list[list[int]]) -> list[list[int]]:
    """The sixteen tokens that it says after each prompt."""
    return [[ranked[0][1] for ranked in said] for said in spoken(server, prompts)]


def spoken(server: Server, prompts: list[list[int]]) -> Scores:
    """Sixteen tokens after each prompt: the one that was said, before those that came next to it.

    Which of two equally likely ones is said, the server decides.
    """
    body = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 2, "return_tokens_as_token_ids": True}
    answers = [
        server.post("v1/completions", {"prompt": prompt, **body})["choices"][0]["logprobs"] for prompt in prompts
    ]
    return [list(map(_ranked, answer["tokens"], answer["top_logprobs"])) for answer in answers]


def _ranked(said: str, likeliest: dict[str, float]) -> list[tuple[float, int]]:
    others = sorted(((score, name) for name, score in likeliest.items() if name != said), reverse=True)
    return [(score, int(name.removeprefix("token_id:"))) for score, name in [(likeliest[said], said), *others]]


def forks(one: Scores, other: Scores) -> list[float]:
    """Where two that speak say another token for the first time: the first one's gap there."""
    pairs = [next(((p, q) for p, q in zip(a, b, strict=True) if p[0][1] != q[0][1]), None)
             for a, b in zip(one, other, strict=True)]  # fmt: skip
    return sorted(_gap(pair[0]) for pair in pairs if pair)


def clear_choices(judge: Server, prompts: list[list[int]], said: list[list[int]]) -> list[tuple[int, int]]:
    """(token that was said, the judge's likeliest there), where the judge, which reads the same words, is clear."""
    scores = judge.scores([prompt + tokens for prompt, tokens in zip(prompts, said, strict=True)])
    return [
        (token, ranked[0][1])
        for tokens, found in zip(said, scores, strict=True)
        for token, ranked in zip(tokens, found[-len(tokens) :], strict=True)
        if _gap(ranked) > GAP
    ]


def agreement(one: Scores, other: Scores) -> tuple[int, int, int]:
    """(positions with a clear winner, those where both servers name the same, all positions)."""
    pairs = [(p, q) for a, b in zip(one, other, strict=True) for p, q in zip(a, b, strict=True)]
    clear = [(p, q) for p, q in pairs if _gap(p) > GAP]
    return len(clear), sum(p[0][1] == q[0][1] for p, q in clear), len(pairs)


def gaps_of_differing(one: Scores, other: Scores) -> list[float]:
    """How far apart the first server's two likeliest tokens are where both have a clear winner but name another."""
    pairs = [(p, q) for a, b in zip(one, other, strict=True) for p, q in zip(a, b, strict=True)]
    return sorted(_gap(p) for p, q in pairs if _gap(p) > GAP and p[0][1] != q[0][1])


def _gap(ranked: list[tuple[float, int]]) -> float:
    return ranked[0][0] - ranked[1][0]
