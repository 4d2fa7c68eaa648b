"""``foldmoe report``: result files as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foldmoe.cli import errors
from foldmoe.cli.files import writable
from foldmoe.report.page import render
from foldmoe.report.page.sources import sections


def report(
    results: Annotated[list[Path], typer.Argument(help="Result files, or folders of them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="The page's heading.")] = "foldmoe report",
) -> None:
    """Write one HTML page of plans, layer timings, serving and accuracy results. It needs no network to read."""
    with errors.shown():
        writable("--out", out)
        found, passed_over = sections(results)
        try:
            page = render(found, title)
        except ImportError as error:
            raise ValueError(error) from error
        out.write_text(page, encoding="utf-8")
    for reason in passed_over.values():
        typer.echo(f"passed over: {reason}", err=True)
    typer.echo(f"{out}: {len(found)} sections, {len(page.encode()):,} bytes")
