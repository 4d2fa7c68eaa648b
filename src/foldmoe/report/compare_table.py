"""Two layer results side by side, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from foldmoe.report.fitted import Fitted

if TYPE_CHECKING:
    from foldmoe.bench.compare import Change, Comparison

_STYLES = {"slower": "bold red", "faster": "green"}


def compare_table(found: Comparison, old: str) -> RenderableType:
    """One row an arm and number of tokens; what differs between the runs besides; the count of regressions."""
    table = Fitted(
        ("tokens", "arm", "before us", "after us", "change", "noise of both", ""),
        left=("arm", ""),
        spare=("noise of both", "before us"),
        title=f"against {old}",
    )
    for change in found.changes:
        table.add_row(_cells(change), style=_STYLES.get(change.verdict))
    count = len(found.regressions)
    slower = f"{count} rows slower by more than the noise" if count else "no row is slower"
    if not found.compared:
        slower = "no row was judged"
    last = f"{slower}, {found.compared} of {len(found.changes)} rows compared"
    return Group(table, *(Text(f"differs: {line}") for line in found.differences), Text(last, style="bold"))


def _cells(change: Change) -> tuple[str, ...]:
    before, after = (f"{row.seconds * 1e6:,.1f}" if row else "" for row in (change.before, change.after))
    moved = "" if change.ratio is None else f"{change.ratio - 1:+.1%}"
    noise = "unknown" if change.noise is None else f"{change.noise:.1%}"
    return f"{change.row.tokens:,}", change.row.arm, before, after, moved, noise, change.verdict
