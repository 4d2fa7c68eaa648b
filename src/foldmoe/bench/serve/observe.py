"""What a vLLM server says beside its answers: its metrics page, and lines of its log."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})?\s+(\S+)$", re.M)
_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')
_COMPILED = re.compile(
    r"(?:(?:compilation|tuning)\b.* during inference: |TileLang begins to compile kernel `)([^\s(.`]+)", re.I
)
_WEIGHTS = re.compile(r"Model loading took ([\d.]+) GiB")
_UNTUNED = re.compile(r"Using default \S.* config\..*?Config file not found at [\['\"]*([^'\"\]\n]+)")
_TUNED = re.compile(r"Using configuration from (\S+) for ")


def kv_blocks(page: str) -> int | None:
    """Blocks of the KV cache, the fewest of all engines; None where the page does not say."""
    blocks = [int(found) for found in _BLOCKS.findall(page)]
    return min(blocks, default=None)


def prefix_cache(page: str) -> tuple[float, float] | None:
    """Prompt tokens looked up in the prefix cache and found there; None where the page does not say."""
    totals = dict.fromkeys(("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"), 0.0)
    seen = False
    for name, _, value in _SAMPLE.findall(page):
        if name in totals:
            totals[name] += float(value)
            seen = True
    asked, found = totals.values()
    return (asked, found) if seen else None


def hit_share(before: str | None, after: str | None) -> float | None:
    """Share of the prompt tokens between two metrics pages that came from the prefix cache."""
    pages = [prefix_cache(page) if page else None for page in (before, after)]
    if pages[0] is None or pages[1] is None:
        return None
    asked, found = (after - before for before, after in zip(*pages, strict=True))
    return found / asked if asked else None


class Log:
    """A server's log, read piece by piece.

    Args:
        path: grows while it is read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def new(self) -> str:
        """What was added since the last call."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        return data.decode(errors="replace")


def compiled(text: str) -> tuple[str, ...]:
    """Kernels compiled or tuned while requests were served, each once, in order."""
    return tuple(dict.fromkeys(_COMPILED.findall(text)))


def weights_bytes(text: str) -> int | None:
    """What the ranks of vLLM say that loading took, the largest."""
    return max((round(float(found) * 2**30) for found in _WEIGHTS.findall(text)), default=None)


def tuned_tables(text: str) -> tuple[str, ...]:
    """For people: kernels on generic settings because no tuned table fits, and tables that were found."""
    missing, found = (list(dict.fromkeys(pattern.findall(text))) for pattern in (_UNTUNED, _TUNED))
    lines = [f"no tuned table, generic kernel settings: {path.strip()}" for path in missing]
    return tuple(lines + [f"tuned table: {path}" for path in found])
