"""Where tiles were measured: a small table, ``tuned.json``, and whether a batch is in it.

An entry holds one measurement: a GPU, a layer's sizes, the experts on the rank, the mean routes of an expert, the tiles
that won, often the heuristic's own, and both times (microseconds, the whole layer). It speaks for batches of the same
sizes on the same GPU whose experts and routes lie within half an octave of the measured ones, so one expert more (a
shared slot) still finds it; of several, the nearest in routes speaks. Where no other tiles won, and for all else,
:func:`foldmoe.backends.hopper.heuristics.choose` chooses. Neither changes a result's bits.
``python -m tests.hopper.tune --tune --write`` measures and writes entries.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING

from foldmoe.backends.hopper import heuristics
from foldmoe.backends.hopper.pack import padded
from foldmoe.backends.hopper.pack_fp8 import scale_groups

if TYPE_CHECKING:
    from foldmoe.backends.hopper.heuristics import Geometry, HopperConfig
    from foldmoe.moe.spec import ExpertSpec, LayerSpec

TABLE = Path(__file__).with_name("tuned.json")

REACH = 0.5
"""Octaves that an entry's experts and routes may be away from a batch's."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sizes:
    """What must be equal: GPUs by a part of their names, the layer in the kernel's steps of 128 columns."""

    hidden: int
    routed_steps: int
    shared_steps: int
    scale_groups: int
    routed: str
    routed_groups: int

    @classmethod
    def of_geometry(cls, g: Geometry) -> Sizes:
        steps = g.k_down4 * g.step // 128, g.k_down8 * g.step // 128
        return cls(g.hidden, *steps, g.scale_groups, g.routed, g.routed_groups)

    @classmethod
    def of_spec(cls, spec: LayerSpec) -> Sizes:
        """Of one rank's part of a layer."""
        routed, shared = spec.routed, spec.shared
        kind = "fp8" if routed.format.fp8 else routed.format.value
        columns = _scale_columns(shared) if shared and shared.format.fp8 else 0
        width = shared.width if shared else 0
        return cls.of_widths(spec.hidden, routed.width, width, columns, kind, _scale_columns(routed))

    @classmethod
    def of_widths(
        cls, hidden: int, routed: int, shared: int, scale_columns: int, kind: str, routed_columns: int
    ) -> Sizes:
        groups = scale_groups(scale_columns) if scale_columns else 0
        routed_groups = scale_groups(routed_columns) if kind == "fp8" else 0
        return cls(hidden, padded(routed) // 128, padded(shared) // 128, groups, kind, routed_groups)


@dataclass(frozen=True)
class Entry:
    """One measurement; see the module.

    Args:
        gpu: part of the GPU's name, in any case.
        scale_columns: columns that one shared scale spans; 0 without a shared expert in FP8.
        tokens, shared_tokens, warpgroups: see :class:`foldmoe.backends.hopper.heuristics.HopperConfig`.
        microseconds, heuristic_microseconds: the layer with these tiles and with the heuristic's, in one run; equal
            where they are the heuristic's.
        routed: how routed weights are stored, as in :class:`foldmoe.backends.hopper.heuristics.Geometry`.
        routed_scale_columns: columns that one scale of routed FP8 weights spans; 0 for other formats.
    """

    gpu: str
    hidden: int
    routed_width: int
    shared_width: int
    scale_columns: int
    experts: int
    routes_per_expert: float
    tokens: int
    shared_tokens: int
    warpgroups: int
    microseconds: float
    heuristic_microseconds: float
    routed: str = "mxfp4"
    routed_scale_columns: int = 0

    @property
    def sizes(self) -> Sizes:
        widths = self.hidden, self.routed_width, self.shared_width
        return Sizes.of_widths(*widths, self.scale_columns, self.routed, self.routed_scale_columns)

    def fits(self, sizes: Sizes, experts: int, gpu: str) -> bool:
        """Whether it speaks for some batch of this layer."""
        named = self.gpu.lower() in gpu.lower()
        return named and self.sizes == sizes and _octaves(experts, self.experts) <= REACH

    @property
    def replaces(self) -> bool:
        """Whether its tiles won against the heuristic's."""
        return self.microseconds < self.heuristic_microseconds

    def config(self, geometry: Geometry) -> HopperConfig:
        return heuristics.build(geometry, self.tokens, self.shared_tokens, self.warpgroups)


@dataclass(frozen=True)
class Choice:
    """A config, and the measurement that speaks for its batch, if there is one."""

    config: HopperConfig
    entry: Entry | None

    @property
    def source(self) -> str:
        return "tuned" if self.entry else "heuristic"


@cache
def table() -> tuple[Entry, ...]:
    """All measurements."""
    return tuple(Entry(**entry) for entry in json.loads(TABLE.read_text()))


@lru_cache(maxsize=4096)
def choose(
    geometry: Geometry, rows: int, routes_per_row: float, experts: int, gpu: str, powers: bool = False
) -> Choice:
    """Tiles for a batch of ``rows`` tokens on ``gpu``; logged (level INFO) once for every shape."""
    routes = rows * routes_per_row / max(1, experts)
    sizes = Sizes.of_geometry(geometry)
    near = [entry for entry in table() if entry.fits(sizes, experts, gpu)]
    near = [entry for entry in near if _octaves(routes, entry.routes_per_expert) <= REACH]
    entry = min(near, key=lambda entry: _octaves(routes, entry.routes_per_expert), default=None)
    if entry and entry.replaces:
        config = entry.config(geometry)
    else:
        config = heuristics.choose(geometry, rows, routes_per_row, experts, powers)
    choice = Choice(config, entry)
    _log.info("%d tokens, %d experts, H %d: %s (%s)", rows, experts, sizes.hidden, config.describe(), choice.source)
    return choice


def describe(spec: LayerSpec, gpu: str) -> str:
    """One line for the plan of ``spec``, one rank's part, on ``gpu``."""
    found = [entry for entry in table() if entry.fits(Sizes.of_spec(spec), spec.routed.count, gpu)]
    if not found:
        return f"heuristic: no tuned entry for {spec.routed.count} experts of these sizes on {gpu}"
    routes = ", ".join(f"{entry.routes_per_expert:g}" for entry in sorted(found, key=lambda e: e.routes_per_expert))
    return f"tuned around {routes} routes an expert, heuristic elsewhere"


def _octaves(a: float, b: float) -> float:
    return abs(log2(a / b)) if a > 0 else float("inf")


def _scale_columns(experts: ExpertSpec) -> int:
    return min(experts.block[1], experts.format.block[1])
