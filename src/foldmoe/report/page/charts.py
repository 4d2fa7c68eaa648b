"""Charts as plain geometry: what is drawn where. ``templates/chart.svg`` writes them out.

A drawing is 480 units wide, about what a phone shows, so that its words stay readable there. Colours are the page's,
light or dark; every series has a marker and, for lines, a dash of its own, so that nothing rests on colour alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from foldmoe.report.page.axes import Axis, thinned

WIDTH = 480
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 466, 14, 282
_HEIGHT = 328
_LANE, _HEAD, _BODY_TOP = 17, 22, 8
LOOKS = 8
"""How many series look different."""


@dataclass(frozen=True)
class Point:
    """A median with its lowest and highest, in what the axes measure."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None

    @property
    def finite(self) -> bool:
        """It has a place on an axis; a NaN in a result has none, and stands in the tables alone."""
        return all(math.isfinite(value) for value in (self.x, self.y, self.low, self.high) if value is not None)


@dataclass(frozen=True)
class Series:
    """One arm.

    Args:
        name: as in the tables.
        points: in rising order of x.
        bound: drawn as a limit, dashed and without markers.
    """

    name: str
    points: tuple[Point, ...]
    bound: bool = False


@dataclass(frozen=True)
class Mark:
    """A point as drawn: its place and its whisker's ends along y (or along x, for dots)."""

    x: float
    y: float
    low: float | None
    high: float | None
    label: str


@dataclass(frozen=True)
class Drawn:
    """A series as drawn; ``look`` picks colour, marker and dash."""

    name: str
    look: str
    path: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Tick:
    """A number beside an axis."""

    at: float
    text: str


@dataclass(frozen=True)
class Lines:
    """Lines over tokens, both axes logarithmic unless told otherwise.

    Args:
        title, text: what a screen reader says of it.
        x_label, y_label: what the axes measure, with units.
        series: at least one point in all.
    """

    kind: ClassVar[str] = "lines"
    title: str
    text: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    log_y: bool = True

    @property
    def height(self) -> int:
        return _HEIGHT

    @property
    def x(self) -> Axis:
        return Axis.over((p.x for s in self.series for p in s.points), _LEFT + 6, _RIGHT, log=True, room=0.03)

    @property
    def y(self) -> Axis:
        ends = [v for s in self.series for p in s.points for v in (p.y, p.low, p.high) if v is not None]
        return Axis.over(ends, _BOTTOM, _TOP, log=self.log_y)

    def x_ticks(self) -> list[Tick]:
        """The measured numbers themselves, as far as they have room."""
        measured = sorted({p.x for s in self.series for p in s.points})
        return [Tick(self.x.at(value), number(value)) for value in thinned(measured, self.x, 36)]

    def y_ticks(self) -> list[Tick]:
        return [Tick(self.y.at(value), number(value)) for value in self.y.ticks()]

    def drawn(self) -> list[Drawn]:
        x, y = self.x, self.y
        found = []
        for series, look in zip(self.series, _looks(self.series), strict=True):
            marks = tuple(
                Mark(x.at(p.x), y.at(p.y), _at(y, p.low), _at(y, p.high), f"{series.name}: {number(p.y)} at {p.x:,g}")
                for p in series.points
            )
            path = " ".join(f"{'M' if i == 0 else 'L'}{m.x} {m.y}" for i, m in enumerate(marks))
            found.append(Drawn(series.name, look, path, () if series.bound else marks))
        return found


@dataclass(frozen=True)
class Dots:
    """A row of dots a category, one lane a series: a value with its interval, from left to right.

    Args:
        title, text: what a screen reader says of it.
        x_label: what is measured, with its unit.
        categories: by the whole numbers that points have as x.
        series: at least one point in all.
        line: a value that all are read against; drawn through.
    """

    kind: ClassVar[str] = "dots"
    title: str
    text: str
    x_label: str
    categories: tuple[str, ...]
    series: tuple[Series, ...]
    line: float | None = None

    @property
    def _body(self) -> int:
        return _HEAD + _LANE * len(self.series)

    @property
    def bottom(self) -> int:
        return _BODY_TOP + self._body * len(self.categories)

    @property
    def height(self) -> int:
        return self.bottom + 46

    @property
    def x(self) -> Axis:
        ends = [v for s in self.series for p in s.points for v in (p.y, p.low, p.high) if v is not None]
        return Axis.over([*ends, *([] if self.line is None else [self.line])], 16, _RIGHT)

    def x_ticks(self) -> list[Tick]:
        return [Tick(self.x.at(value), number(value)) for value in self.x.ticks()]

    def heads(self) -> list[Tick]:
        """Each category's words, above its lanes."""
        return [Tick(_BODY_TOP + self._body * row + 14, text) for row, text in enumerate(self.categories)]

    def line_at(self) -> float | None:
        return _at(self.x, self.line)

    def drawn(self) -> list[Drawn]:
        x = self.x
        found = []
        for lane, (series, look) in enumerate(zip(self.series, _looks(self.series), strict=True)):
            marks = tuple(
                Mark(
                    x.at(p.y),
                    _BODY_TOP + self._body * p.x + _HEAD + _LANE * lane + _LANE / 2,
                    _at(x, p.low),
                    _at(x, p.high),
                    f"{series.name}, {self.categories[int(p.x)]}: {number(p.y)}",
                )
                for p in series.points
            )
            found.append(Drawn(series.name, look, "", marks))
        return found


def _at(axis: Axis, value: float | None) -> float | None:
    return None if value is None else axis.at(value)


def _looks(series: tuple[Series, ...]) -> list[str]:
    """``s0``, ``s1`` ... in order, then once more as ``s0 again``; a bound takes none of them."""
    numbers = iter(range(len(series)))
    return ["bound" if s.bound else _look(next(numbers)) for s in series]


def _look(index: int) -> str:
    return f"s{index % LOOKS}" + (" again" if index >= LOOKS else "")


def number(value: float) -> str:
    """Three digits or all whole ones, no exponent: 0.052, 46, 1,037; nan and inf by name."""
    if not math.isfinite(value):
        return str(value)
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
