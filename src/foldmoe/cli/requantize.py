"""``foldmoe requantize``: a new checkpoint whose shared experts are MXFP4."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from foldmoe.checkpoint.requantize import requantize as write
from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.report.check_tables import requantize_table


def requantize(
    checkpoint: Annotated[str, typer.Argument(help="A local folder.")],
    out: Annotated[str, typer.Argument(help="A folder that does not exist yet, or is empty.")],
) -> None:
    """Lower shared experts to MXFP4 where the routed ones have it, in a copy of the checkpoint. Precision is lost."""
    log = Console(stderr=True)
    with errors.shown():
        done = write(checkpoint, out, progress=lambda shard: log.print(f"written and read back: {shard}"))
    console().print(requantize_table(done))
