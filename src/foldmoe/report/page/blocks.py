"""What a page is made of: sections of lines, tables and charts. No HTML here; the template writes that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from foldmoe.report.page.charts import Dots, Lines


@dataclass(frozen=True)
class Table:
    """Text by rows and columns.

    Args:
        caption: what the table says; read aloud first.
        headings: of the columns.
        rows: one text a heading.
        words: headings whose cells are words; all others are numbers and stand to the right.
        marks: by row number, a class of the style sheet ("best", "bad").
    """

    kind: ClassVar[str] = "table"
    caption: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: frozenset[str] = frozenset()
    marks: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Notes:
    """Short lines, each on its own."""

    kind: ClassVar[str] = "notes"
    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Source:
    """The file behind a section, the command that asks again, and what it ran on."""

    kind: ClassVar[str] = "source"
    path: str
    command: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Charts:
    """Charts that stand side by side where there is room."""

    kind: ClassVar[str] = "charts"
    charts: tuple[Lines | Dots, ...]


@dataclass(frozen=True)
class Section:
    """One result file.

    Args:
        title: its heading.
        lead: the finding in a sentence or two.
        blocks: in order.
    """

    title: str
    lead: tuple[str, ...]
    blocks: tuple[Table | Notes | Source | Charts, ...]
