"""A table of timed rows: one section for each number of tokens, versions and remarks under it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rich.console import RenderableType


class Timed(Protocol):
    """A row of a result."""

    @property
    def tokens(self) -> int: ...


R = TypeVar("R", bound=Timed)


def by_tokens(
    headings: Iterable[str],
    rows: Iterable[R],
    cells: Callable[[R], tuple[str, ...]],
    *,
    left: tuple[str, ...],
    versions: Mapping[str, str],
    remarks: Iterable[str],
    wrap: bool = True,
    **table: Any,
) -> RenderableType:
    """Rows under ``headings``, in the order given.

    Args:
        cells: a row's texts.
        left: headings of text columns; numbers stand to the right.
        wrap: cells may break into lines.
        table: options of :class:`rich.table.Table`.
    """
    found = Table(title_justify="left", **table)
    for heading in headings:
        found.add_column(heading, justify="left" if heading in left else "right", no_wrap=not wrap)
    for _, section in groupby(rows, key=lambda row: row.tokens):
        for row in section:
            found.add_row(*cells(row))
        found.add_section()
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Group(found, *(Text(line) for line in (named, *remarks)))
