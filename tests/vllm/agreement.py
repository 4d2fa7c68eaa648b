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

PROMPTS = [[random.Random(seed).randrange(3, 512) for _ in range(48)] for seed in range(6)]

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


def agreement(one: Scores, other: Scores) -> tuple[int, int, int]:
    """(positions with a clear winner, those where both servers name the same, all positions)."""
    pairs = [(p, q) for a, b in zip(one, other, strict=True) for p, q in zip(a, b, strict=True)]
    clear = [(p, q) for p, q in pairs if p[0][0] - p[1][0] > GAP]
    return len(clear), sum(p[0][1] == q[0][1] for p, q in clear), len(pairs)
