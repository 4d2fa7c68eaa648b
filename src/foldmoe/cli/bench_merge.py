"""``foldmoe bench merge``: arms that were served in several processes, in one table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foldmoe.bench.serve.merging import merge
from foldmoe.bench.serve.results import ServeResult
from foldmoe.bench.serve.runner import RESULT
from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.report.serve_table import serve_table


def merged(
    folders: Annotated[list[Path], typer.Argument(help="Folders that 'foldmoe bench serve' wrote with --out.")],
    out: Annotated[Path, typer.Option(help="Folder for the merged result.")],
) -> None:
    """Put arms that were served at the same time, each on a GPU of its own, into one result.

    Servers, clients and workloads must be the same. One arm may be in two folders: it then is the noise floor, which
    so holds the difference between the GPUs too.
    """
    with errors.shown():
        result = merge({str(folder): ServeResult.load(folder / RESULT) for folder in folders})
        out.mkdir(parents=True, exist_ok=True)
        if (out / RESULT).exists():
            raise ValueError(f"{out / RESULT} exists: choose another --out")
        result.save(out / RESULT)
    console().print(serve_table(result))
