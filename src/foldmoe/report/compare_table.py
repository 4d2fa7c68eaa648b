"""Two layer results side by side, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from foldmoe.bench.compare import Change, Comparison

_STYLES = {"slower": "bold red", "faster": "green"}


def compare_table(found: Comparison, old: str) -> RenderableType:
    """One row an arm and number of tokens; what differs between the runs besides; the count of regressions."""
    table = Table(title=f"against {old}", title_justify="left")
    for heading in ("tokens", "arm", "before us", "after us", "change", "noise of both", ""):
        table.add_column(heading, justify="left" if heading in ("arm", "") else "right")
    for change in found.changes:
        table.add_row(*_cells(change), style=_STYLES.get(change.verdict))
    count = len(found.regressions)
    slower = f"{count} rows slower by more than the noise" if count else "no row is slower"
    last = f"{slower}, {found.compared} of {len(found.changes)} rows compared"
    return Group(table, *(Text(f"differs: {line}") for line in found.differences), Text(last, style="bold"))


def _cells(change: Change) -> tuple[str, ...]:
    before, after = (f"{row.seconds * 1e6:,.1f}" if row else "" for row in (change.before, change.after))
    moved = "" if change.ratio is None else f"{change.ratio - 1:+.1%}"
    return f"{change.row.tokens:,}", change.row.arm, before, after, moved, f"{change.noise:.1%}", change.verdict
