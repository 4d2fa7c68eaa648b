"""A pairwise set of forward calls: each two values of what a backend's tests vary meet in at least one call.

The factors are a layer's formats, its widths (the routed or the shared expert's), whatever else a backend adds, the
batch size M and the routing. Chosen greedily, the call that adds most pairs first, and the same in every run.
"""

from __future__ import annotations

from itertools import combinations, product
from typing import TYPE_CHECKING, TypeVar

from tests.support.cases import CASE_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

L = TypeVar("L")
Trait = tuple[str, object]
"""A factor and its value: ("width", 192)."""

WIDTHS = (64, 192, 288, 320, 2048, 2304, 3072)
TOKENS = (0, 1, 2, 3, 7, 8, 17, 64, 65, 129, 1000, 8192)
LEAST_TOKENS = {
    "random": 0,
    "all_on_one_expert": 1,
    "half_experts_empty": 2,
    "absent_ids": 1,
    "duplicate_ids": 1,
    "nan_padding": 3,
    "zero_rows": 2,
    "tiny_amax": 2,
}
"""Routings that meet everything, and the fewest tokens with which each is anything else than ``random``."""

OTHERS = tuple(name for name in CASE_NAMES if name not in LEAST_TOKENS and name != "no_tokens")
"""Routings that meet batch sizes only, of ``OTHERS_TOKENS``."""

OTHERS_TOKENS = (7, 129, 1000)


def pairs(traits: Iterable[Trait], tokens: int, routing: str) -> frozenset[frozenset[Trait]]:
    """Of one call, every two values of different factors."""
    values = [*traits, ("tokens", tokens), ("routing", routing)]
    return frozenset(frozenset(two) for two in combinations(values, 2) if two[0][0] != two[1][0])


def cover(
    layers: Mapping[L, frozenset[Trait]], group: Callable[[L, int], Hashable] = lambda layer, tokens: layer
) -> list[tuple[L, int, str]]:
    """Layer, M and routing of each call, by layer.

    Args:
        layers: and their traits.
        group: what a layer shares its compiled kernels by at M tokens; of calls that add as much, one of a group that
            is in the set already is taken.
    """
    bits: dict[frozenset[Trait], int] = {}
    calls, groups = {}, {}
    for layer, tokens in product(layers, TOKENS):
        groups[layer, tokens] = group(layer, tokens)
        for routing, least in LEAST_TOKENS.items():
            if tokens >= least:
                found = pairs(layers[layer], tokens, routing)
                calls[layer, tokens, routing] = sum(1 << bits.setdefault(pair, len(bits)) for pair in found)
    missing, seen = (1 << len(bits)) - 1, set()
    chosen: list[tuple[L, int, str]] = []
    while missing:
        gains = {call: (met & missing).bit_count() for call, met in calls.items()}
        most = max(gains.values())
        best = [call for call, gain in gains.items() if gain == most]
        call = next((call for call in best if groups[call[:2]] in seen), best[0])
        missing &= ~calls[call]
        seen.add(groups[call[:2]])
        chosen.append(call)
    for n, (routing, tokens) in enumerate(product(OTHERS, OTHERS_TOKENS)):
        there = [call[0] for call in chosen if call[1] == tokens]
        chosen.append((there[n % len(there)], tokens, routing))
    order = {layer: i for i, layer in enumerate(layers)}
    return sorted(chosen, key=lambda c: (order[c[0]], c[1], c[2]))
