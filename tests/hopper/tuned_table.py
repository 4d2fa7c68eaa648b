"""From measured times to the table of tuned tiles, for tune.py."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from foldmoe.backends.hopper.pack_fp8 import PackedFp8
from foldmoe.backends.hopper.tuned import Entry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from foldmoe.backends.hopper.batch import Weights
    from foldmoe.backends.hopper.heuristics import HopperConfig

MARGIN = 0.99
"""Tiles win where they take less than this part of the heuristic's time: less is within the noise of one run."""


def merge(
    table: Iterable[Entry], layer: Weights, routes: float, times: dict[HopperConfig, float], usual: HopperConfig
) -> list[Entry]:
    """``table`` with what ``times`` (microseconds a layer, one run) say of ``layer`` at ``routes`` an expert.

    A newer measurement of the same point replaces the older one. Where the heuristic's ``usual`` tiles are as good as
    the best, they are the entry's.
    """
    best = min(times, key=lambda config: times[config])
    if times[best] >= MARGIN * times[usual]:
        best = usual
    shared = layer.shared_down
    entry = Entry(
        gpu=layer.gpu.removeprefix("NVIDIA "),
        hidden=layer.geometry.hidden,
        routed_width=layer.down.shape[2],
        shared_width=shared.shape[2] if shared else 0,
        scale_columns=shared.block[1] if isinstance(shared, PackedFp8) else 0,
        experts=layer.experts,
        routes_per_expert=routes,
        tokens=best.tokens,
        shared_tokens=best.shared_tokens,
        warpgroups=best.warpgroups,
        microseconds=round(times[best], 1),
        heuristic_microseconds=round(times[usual], 1),
        routed=layer.geometry.routed,
        routed_scale_columns=layer.down.block[1] if isinstance(layer.down, PackedFp8) else 0,
    )
    others = [other for other in table if _point(other) != _point(entry)]
    return [*others, entry]


def text(entries: Iterable[Entry]) -> str:
    """The file, in an order that makes changes easy to read."""
    return json.dumps([asdict(entry) for entry in sorted(entries, key=_point)], indent=2) + "\n"


def _point(entry: Entry) -> tuple[object, ...]:
    return (
        entry.gpu,
        entry.hidden,
        entry.routed_width,
        entry.shared_width,
        entry.scale_columns,
        entry.experts,
        entry.routes_per_expert,
        entry.routed,
        entry.routed_scale_columns,
    )
