"""A result of ``foldmoe bench serve`` as a section: changes with their verdicts, every arm, every doubt."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from foldmoe.bench.serve import arms, summary
from foldmoe.report.page.blocks import Charts, Notes, Section, Source, Table
from foldmoe.report.page.charts import Dots, Point, Series, number
from foldmoe.report.serve_table import remarks

if TYPE_CHECKING:
    from foldmoe.bench.serve.results import ServeResult
    from foldmoe.bench.serve.summary import Change, Spread

_BASELINES = ("serial", "stock-serial")
"""What changes are shown against: the first of these that was served, else the first arm."""


def serve_section(result: ServeResult, path: str) -> Section:
    """Arms without a valid run stay in the tables as "none"."""
    base = next((arm for arm in _BASELINES if arm in result.arms), result.arms[0])
    charts = tuple(chart for metric in summary.METRICS if (chart := _chart(result, base, metric)))
    whole = "complete" if result.complete else "INCOMPLETE: some runs are missing or do not count"
    what = f"{result.workloads.what or result.workloads.name}: {result.repeats} repeats, {whole}."
    return Section(
        f"Serving: {result.workloads.name}",
        (what, *_findings(result, base)),
        (
            *((Charts(charts),) if charts else ()),
            *(_changes(result, base, metric) for metric in summary.METRICS),
            _spreads(result),
            _servers(result, base),
            Notes("What each arm decided, and what casts doubt", tuple(remarks(result))),
            Source(path, result.command, {"server": result.serve_cmd, "client": result.client_cmd, **result.versions}),
        ),
    )


def _findings(result: ServeResult, base: str) -> list[str]:
    """By arm: how many workloads are better, tied and worse in tokens a second."""
    lines = []
    for arm in (name for name in result.arms if name != base):
        found = [
            summary.change(result, base, arm, workload.name, summary.THROUGHPUT)
            for workload in result.workloads.workloads
        ]
        counts = Counter("none valid" if change is None else change.verdict for change in found)
        words = ", ".join(f"{verdict} in {count}" for verdict, count in counts.items())
        lines.append(
            f"{arms.find(arm).label} against {arms.find(base).label}, output tokens a second: {words} of "
            f"{len(found)} workloads."
        )
    return lines


def _chart(result: ServeResult, base: str, metric: str) -> Dots | None:
    """Percent against the baseline's median, by workload; None without a valid baseline run."""
    workloads = [w.name for w in result.workloads.workloads]
    medians = {name: found.median for name in workloads if (found := summary.spread(result, base, name, metric))}
    kept = [name for name in workloads if medians.get(name)]
    series = []
    for arm in result.served:
        all_points = (
            Point(row, *(100 * (value / medians[name] - 1) for value in (found.median, found.low, found.high)))
            for row, name in enumerate(kept)
            if (found := summary.spread(result, arm, name, metric))
        )
        if points := tuple(point for point in all_points if point.finite):
            series.append(Series(arms.find(arm).label, points))
    if not series:
        return None
    heading = summary.METRICS[metric]
    spoken = (f"{s.name}: " + ", ".join(f"{p.y:+.1f} % at in/out {kept[int(p.x)]}" for p in s.points) for s in series)
    better = "more is better" if metric.endswith("_throughput") else "less is better"
    return Dots(
        f"{heading} against {arms.find(base).label}",
        f"Change of the median in percent. {'; '.join(spoken)}.",
        f"change, %: median, lowest and highest ({better})",
        tuple(f"in/out {name}" for name in kept),
        tuple(series),
        line=0.0,
    )


def _changes(result: ServeResult, base: str, metric: str) -> Table:
    """As engineers post them, and whether it is more than noise."""
    rows: list[tuple[str, ...]] = []
    marks = {}
    for workload in result.workloads.workloads:
        for arm in (name for name in result.arms if name != base):
            found = summary.change(result, base, arm, workload.name, metric)
            marks[len(rows)] = {"worse": "bad", "better": "best"}.get(found.verdict if found else "", "")
            rows.append((workload.name, arms.find(arm).label, *_change(found)))
    headings = (
        "in/out, concurrency",
        "arm",
        "before",
        "after",
        "change",
        "without the first repeat",
        "noise",
        "verdict",
    )
    return Table(
        f"{summary.METRICS[metric]} against {arms.find(base).label}; noise is one arm against itself",
        headings,
        tuple(rows),
        frozenset(("in/out, concurrency", "arm", "verdict")),
        marks,
    )


def _change(found: Change | None) -> tuple[str, ...]:
    if found is None:
        return "", "", "", "", "", "no valid run"
    return (
        number(found.before.median),
        number(found.after.median),
        f"{found.relative:+.1%}",
        "" if found.without_first is None else f"{found.without_first:+.1%}",
        "" if found.noise is None else f"{found.noise:.1%}",
        found.verdict,
    )


def _spreads(result: ServeResult) -> Table:
    rows = []
    for workload in result.workloads.workloads:
        for arm in result.served:
            found = [summary.spread(result, arm, workload.name, metric) for metric in summary.METRICS]
            count = found[0].repeats if found[0] else 0
            rows.append((workload.name, arms.find(arm).label, *map(_spread, found), f"{count} of {result.repeats}"))
    headings = ("in/out, concurrency", "arm", *summary.METRICS.values(), "repeats that count")
    return Table("Every arm: median, lowest..highest", headings, tuple(rows), frozenset(headings[:2]))


def _spread(found: Spread | None) -> str:
    return f"{number(found.median)}, {number(found.low)}..{number(found.high)}" if found else "none"


def _servers(result: ServeResult, base: str) -> Table:
    rows = []
    for arm in result.served:
        found = [server for server in result.servers if server.arm == arm and result.asks_for(server)]
        weights, blocks = summary.memory(result, arm)
        same = summary.same_texts(result, base, arm) if arm != base else None
        rows.append(
            (
                arms.find(arm).label,
                ", ".join(dict.fromkeys(server.runs_as for server in found if server.runs_as)) or "does not say",
                f"{len(found)} of {result.repeats}",
                "" if weights is None else f"{weights / 2**30:.3f}",
                "" if blocks is None else f"{blocks:,}",
                f"{same[0]:,} of {same[1]:,}" if same else "",
            )
        )
    headings = (
        "arm", "runs as, read from its ranks", "servers", "weights, GiB a rank", "KV blocks",
        f"answers equal to {arms.find(base).label}'s",
    )  # fmt: skip
    return Table("Servers", headings, tuple(rows), frozenset(headings[:2]))
