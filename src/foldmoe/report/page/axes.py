"""Where a number lies on an axis, and which numbers are written beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_STEPS = (1.0, 2.0, 5.0)


@dataclass(frozen=True)
class Axis:
    """From ``low`` to ``high`` over ``start`` to ``end`` units of the drawing.

    Args:
        low, high: the ends, in what is measured; both positive for ``log``.
        start, end: where they lie.
        log: equal ratios take equal room.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, *, log: bool = False, room: float = 0.06) -> Axis:
        """An axis that holds all values, with ``room`` (a share of its length) at both ends."""
        found = list(values)
        low, high = min(found), max(found)
        if log:
            spread = max(math.log(high / low), 0.1) * room
            return cls(low * math.exp(-spread), high * math.exp(spread), start, end, log=True)
        spread = max((high - low) * room, abs(high) * 1e-3, 1e-9)
        return cls(low - spread, high + spread, start, end)

    def at(self, value: float) -> float:
        """Where a value lies, in units of the drawing."""
        low, high, here = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(self.start + (here - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self, most: int = 7) -> list[float]:
        """At most ``most`` round numbers, evenly spaced on the axis, that lie on it."""
        candidates = self._log_ticks() if self.log else self._linear_ticks()
        return next((found for found in candidates if len(found) <= most), [])

    def _log_ticks(self) -> Iterable[list[float]]:
        """1 2 5 10, then powers of ten, then every second power."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        if self.high / self.low < 5:
            yield from self._linear_ticks()
        yield self._inside(step * 10.0**power for power in powers for step in _STEPS)
        for stride in range(1, len(powers) + 1):
            yield self._inside(10.0**power for power in powers[::stride])

    def _linear_ticks(self) -> Iterable[list[float]]:
        base = math.floor(math.log10(self.high - self.low)) - 1
        for power in range(base, base + 4):
            for step in _STEPS:
                size = step * 10.0**power
                first = math.ceil(self.low / size)
                yield self._inside(size * i for i in range(first, math.floor(self.high / size) + 1))

    def _inside(self, values: Iterable[float]) -> list[float]:
        return [value for value in values if self.low <= value <= self.high]


def thinned(values: Sequence[float], axis: Axis, gap: float) -> list[float]:
    """The values whose places lie at least ``gap`` apart, from the first on; the last one always stays."""
    kept: list[float] = []
    for value in values:
        if not kept or abs(axis.at(value) - axis.at(kept[-1])) >= gap:
            kept.append(value)
    if kept and kept[-1] != values[-1]:
        kept[-1] = values[-1]
    return kept
