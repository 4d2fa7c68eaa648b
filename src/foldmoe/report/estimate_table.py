"""Expected times under expert parallelism, a table for each run of identical layers, and what they rest on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foldmoe.parallel.kernel_times import HOPPER_BYTES, HOPPER_FIXED, HOPPER_OPERATIONS
from foldmoe.report.plan_table import buffer_line, runs

if TYPE_CHECKING:
    from foldmoe.parallel.estimate import Estimate, Phases
    from foldmoe.planner import CheckpointPlan

_HEADINGS = ("tokens", "strategy", "KB out", "KB back", "dispatch", "local", "combine", "rest", "total")


def estimate_table(plan: CheckpointPlan, estimate: Estimate) -> RenderableType:
    """One row a number of tokens and strategy; times in microseconds, for one layer."""
    parts: list[RenderableType] = []
    for run in runs(plan.rows):
        rows = [row for row in estimate.rows if row.layer == run.first.layer]
        if rows:
            parts.append(_table(f"{run.label}: us a layer, tokens on each of {estimate.ranks} ranks", rows))
    return Group(*parts, *(Text(line) for line in _basis(estimate)))


def _table(title: str, rows: list[Phases]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in _HEADINGS:
        table.add_column(heading, justify="left" if heading == "strategy" else "right")
    for number, row in enumerate(rows):
        if number and rows[number - 1].tokens != row.tokens:
            table.add_section()
        times = (row.dispatch, row.local, row.combine, row.together, row.total)
        table.add_row(
            f"{row.tokens:,}",
            row.strategy,
            f"{row.dispatch_bytes / 1e3:,.0f}",
            f"{row.combine_bytes / 1e3:,.0f}",
            *(f"{seconds * 1e6:,.1f}" for seconds in times),
        )
    return table


def _basis(estimate: Estimate) -> list[str]:
    link, floor = estimate.link, estimate.floor
    lines = [
        f"link: {link.name}, {link.bandwidth / 1e9:,.0f} GB/s a direction ({link.source})",
        "exchanges: fixed times and times a byte as measured on two H200s; rest: what a total takes beyond its phases, "
        "in an all-to-all mostly the host's",
    ]
    sources = [row.source for row in estimate.rows]
    measured = sources.count("table")
    if measured:
        lines.append(f"local: measured in {measured} of {len(sources)} rows")
    elsewhere = " elsewhere" if measured else ""
    if floor is not None and measured < len(sources):
        rates = f"{floor.read_bandwidth / 1e12:,.2f} TB/s and {floor.operations / 1e12:,.0f} TFLOP/s ({floor.source})"
        if "fit" in sources:
            fitted = f"{HOPPER_FIXED * 1e6:.0f} us + {HOPPER_BYTES} x bytes + {HOPPER_OPERATIONS} x operations"
            lines.append(f"local{elsewhere}: {fitted} at {rates}, as fitted to the Hopper backend on an H200")
        if "floor" in sources:
            lines.append(f"local{elsewhere}: floor at {rates}, divided by an efficiency of {estimate.efficiency:.2f}")
    lines.append(
        "uniform routing, phases one after the other; KB out and back: 1000 B a layer over one rank's link, one way"
    )
    if estimate.buffers:
        lines.append(buffer_line(estimate.buffers, max(row.tokens for row in estimate.rows)))
    return lines + [f"not estimated: {line}" for line in estimate.skipped]
