"""A table that leaves columns out where a screen is too narrow, so that no figure is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_WIDE = 10_000
"""Characters; no table is as wide."""


class Fitted:
    """Columns of text break into lines; those of figures are whole, or gone and named under the table.

    Args:
        headings: of all columns.
        left: headings of text columns; numbers stand to the right.
        spare: headings of columns that may go, the first to go first.
        wrap: text may break into lines.
        table: options of :class:`rich.table.Table`.
    """

    def __init__(
        self,
        headings: tuple[str, ...],
        *,
        left: tuple[str, ...],
        spare: tuple[str, ...] = (),
        wrap: bool = True,
        **table: Any,
    ):
        self._headings, self._left, self._spare, self._wrap, self._options = headings, left, spare, wrap, table
        self._rows: list[tuple[tuple[str, ...], str | None]] = []
        self._sections: set[int] = set()

    def add_row(self, cells: tuple[str, ...], style: str | None = None) -> None:
        """A text for each heading."""
        self._rows.append((cells, style))

    def add_section(self) -> None:
        """A line under the last row."""
        self._sections.add(len(self._rows))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for count in range(len(self._spare) + 1):
            gone = self._spare[:count]
            table = self._table(gone)
            if Measurement.get(console, options.update(width=_WIDE), table).minimum <= options.max_width:
                break
        else:
            for column in table.columns:  # still too wide: figures break into lines too
                column.no_wrap, column.min_width = False, None
        yield table
        if gone:
            yield Text(f"left out for want of room: {', '.join(gone)}")

    def _table(self, gone: tuple[str, ...]) -> Table:
        kept = [i for i, heading in enumerate(self._headings) if heading not in gone]
        table = Table(title_justify="left", **self._options)
        for i in kept:
            heading = self._headings[i]
            text = heading in self._left
            widest = max(len(cells[i]) for cells in [self._headings, *(cells for cells, _ in self._rows)])
            table.add_column(
                heading,
                justify="left" if text else "right",
                overflow="fold",
                no_wrap=not (text and self._wrap),
                min_width=None if text and self._wrap else widest,
            )
        for number, (cells, style) in enumerate(self._rows, 1):
            table.add_row(*(cells[i] for i in kept), style=style, end_section=number in self._sections)
        return table
