"""Layer timings as a table: losing rows included, ties marked."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from foldmoe.bench.layer import LayerResult, Row


def bench_table(result: LayerResult) -> RenderableType:
    """One row an arm and number of tokens; a section a number of tokens."""
    table = Table(title=f"shape {result.shape}: {result.what} ({result.spec})", title_justify="left")
    headings = ("tokens", "arm", "us", "low..high", "noise", "GB/s", "TFLOP/s", "x floor", "vs stock", "error")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "arm" else "right")
    for _, rows in groupby(result.rows, key=lambda row: row.tokens):
        for row in rows:
            table.add_row(*_cells(row))
        table.add_section()
    ceilings = result.ceilings
    lines = [
        f"ceilings in this run: {ceilings.read_bandwidth / 1e9:,.0f} GB/s read, "
        f"{ceilings.matmul / 1e12:,.2f} TFLOP/s {ceilings.matmul_dtype}",
        ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        *(f"not run: {arm}: {reason}" for arm, reason in result.refused.items()),
    ]
    return Group(table, *(Text(line) for line in lines))


def _cells(row: Row) -> tuple[str, ...]:
    versus = "" if row.against is None else f"{row.against:.3f}"
    if row.against is not None and abs(row.against - 1) <= row.noise:
        versus += " tie"
    return (
        f"{row.tokens:,}",
        row.arm,
        f"{row.seconds * 1e6:,.1f}",
        f"{row.low * 1e6:,.1f}..{row.high * 1e6:,.1f}",
        f"{row.noise:.1%}",
        f"{row.gigabytes_per_second:,.0f}",
        f"{row.teraflops:,.2f}",
        f"{row.seconds / row.floor:.2f}",
        versus,
        "not checked" if row.error is None else f"{row.error:.1e}",
    )
