"""A result of ``foldmoe bench layer`` as a section: the finding, latency against tokens, every row."""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING

from foldmoe.bench.compare import FEWEST_ROUNDS
from foldmoe.bench.layer import OWN_ARMS
from foldmoe.report.bench_table import HEADINGS, cells, remarks
from foldmoe.report.page.blocks import Charts, Notes, Section, Source, Table
from foldmoe.report.page.charts import Lines, Point, Series, number

if TYPE_CHECKING:
    from foldmoe.bench.result import LayerResult, Row

_LONG = 1e-2
"""Seconds; from here on microseconds have too many digits to stand beside an axis."""


def layer_section(result: LayerResult, path: str) -> Section:
    """Losing rows stay; what did not run stands below the table with its reason."""
    rows = result.rows
    drawn = [row for row in rows if _drawable(row)]
    table = Table(
        f"Every arm at every number of tokens; us is the median of {result.request.rounds} rounds",
        HEADINGS,
        tuple(cells(row, result) for row in rows),
        frozenset(("arm",)),
        {i: "best" for i, row in enumerate(rows) if row.seconds == min(_at(rows, row.tokens))},
    )
    return Section(
        f"Layer {result.shape}: {result.what}",
        (f"{result.spec}.", *_findings(result), *_worst_error(result)),
        (
            *((Charts((_latency(drawn), _over_floor(drawn))),) if drawn else ()),
            table,
            Notes("Ceilings, and what did not run", tuple(remarks(result))),
            Source(path, result.command, result.versions),
        ),
    )


def _drawable(row: Row) -> bool:
    """It has a place on logarithmic axes: no tokens, and a time that is NaN, have none."""
    times = (row.seconds, row.low, row.high, row.floor)
    return row.tokens > 0 and all(math.isfinite(time) and time > 0 for time in times)


def _at(rows: list[Row], tokens: int) -> list[float]:
    return [row.seconds for row in rows if row.tokens == tokens]


def _findings(result: LayerResult) -> list[str]:
    """Where our folded arm wins, ties and loses against the best other arm, by the noise of both."""
    if result.request.rounds < FEWEST_ROUNDS:
        return [f"With {result.request.rounds} rounds the noise is not known, so that no arm is called faster."]
    won: list[str] = []
    tied: list[str] = []
    lost: list[str] = []
    timed = [row for row in result.rows if math.isfinite(row.seconds + row.noise)]
    rows = sorted(timed, key=lambda row: row.tokens)
    for tokens, group in groupby(rows, key=lambda row: row.tokens):
        found = list(group)
        folded = next((row for row in found if row.arm.endswith(" folded")), None)
        rivals = [row for row in found if row is not folded]
        if folded is None or not rivals:
            continue
        rival = min(rivals, key=lambda row: row.seconds)
        moved = folded.seconds / rival.seconds - 1
        words = f"{tokens:,} ({moved:+.1%} against {rival.arm})"
        (tied if abs(moved) <= folded.noise + rival.noise else lost if moved > 0 else won).append(words)
    return [
        f"{words} at these numbers of tokens: {', '.join(found)}."
        for words, found in (
            ("Folded is faster than every other arm", won),
            ("It ties within the noise" if won else "Folded ties within the noise", tied),
            ("It is slower" if won or tied else "Folded is slower", lost),
        )
        if found
    ]


def _worst_error(result: LayerResult) -> list[str]:
    """Of our own arms; a NaN is the worst there is. Others' errors mean something else, as the remarks say."""
    errors = {row: row.error for row in result.rows if row.error is not None and _is_ours(row, result)}
    if not errors:
        return []
    worst = max(errors, key=lambda row: math.inf if math.isnan(errors[row]) else errors[row])
    where = f"{worst.arm}, tokens: {worst.tokens:,}"
    return [f"Largest relative error against the float64 reference: {errors[worst]:.1e} ({where})."]


def _is_ours(row: Row, result: LayerResult) -> bool:
    library, *_, arm = row.arm.split()
    return arm in OWN_ARMS and library not in result.request.peers


def _series(rows: list[Row], scale: dict[int, float]) -> list[Series]:
    """Times by arm, each divided by the number that its tokens have in ``scale``."""
    names = list(dict.fromkeys(row.arm for row in rows))
    return [
        Series(
            name,
            tuple(
                Point(row.tokens, row.seconds / scale[row.tokens], row.low / scale[row.tokens],
                      row.high / scale[row.tokens])
                for row in sorted(rows, key=lambda row: row.tokens) if row.arm == name
            ),
        )
        for name in names
    ]  # fmt: skip


def _latency(rows: list[Row]) -> Lines:
    counts = sorted({row.tokens for row in rows})
    unit, size = ("milliseconds", 1e-3) if max(row.high for row in rows) > _LONG else ("microseconds", 1e-6)
    floors = {row.tokens: row.floor / size for row in rows}
    series = _series(rows, dict.fromkeys(counts, size))
    series.append(Series("floor", tuple(Point(tokens, floors[tokens]) for tokens in counts), bound=True))
    return Lines(
        "Latency against tokens: median, lowest, highest",
        _spoken(f"Median of a layer in {unit}", series),
        "tokens",
        unit,
        tuple(series),
    )


def _over_floor(rows: list[Row]) -> Lines:
    series = _series(rows, {row.tokens: row.floor for row in rows})
    return Lines(
        "Times the floor",
        _spoken("Time divided by the floor of the same run", series),
        "tokens",
        "times the floor; 1 cannot be beaten",
        tuple(series),
    )


def _spoken(what: str, series: list[Series]) -> str:
    """A chart in words: every point, arm by arm."""
    arms = (f"{s.name}: " + ", ".join(f"{number(p.y)} at {p.x:,g}" for p in s.points) for s in series)
    return f"{what}, by number of tokens. {'; '.join(arms)}."
