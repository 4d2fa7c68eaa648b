"""A table of timed rows: one section for each number of tokens, versions and remarks under it."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rich.console import Group
from rich.text import Text

from foldmoe.report.fitted import Fitted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rich.console import RenderableType


class Timed(Protocol):
    """A row of a result."""

    @property
    def tokens(self) -> int: ...


R = TypeVar("R", bound=Timed)


def by_tokens(
    headings: tuple[str, ...],
    rows: Iterable[R],
    cells: Callable[[R], tuple[str, ...]],
    *,
    left: tuple[str, ...],
    versions: Mapping[str, str],
    remarks: Iterable[str],
    spare: tuple[str, ...] = (),
    wrap: bool = True,
    **table: Any,
) -> RenderableType:
    """Rows under ``headings``, in the order given.

    Args:
        cells: a row's texts.
        left: headings of text columns; numbers stand to the right.
        spare: headings of columns that go where there is no room, the first to go first.
        wrap: text may break into lines.
        table: options of :class:`rich.table.Table`.
    """
    found = Fitted(headings, left=left, spare=spare, wrap=wrap, **table)
    for _, section in groupby(rows, key=lambda row: row.tokens):
        for row in section:
            found.add_row(cells(row))
        found.add_section()
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Group(found, *(Text(line) for line in (named, *remarks)))
