"""``foldmoe bench parallel``: one layer over several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foldmoe.bench.parallel import launch
from foldmoe.bench.parallel.result import TRANSPORTS, ParallelRequest
from foldmoe.bench.shapes import CUT_IN_WIDTH, SHAPES, WHOLE
from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.cli.files import writable
from foldmoe.cli.names import names
from foldmoe.cli.numbers import numbers
from foldmoe.report.parallel_table import parallel_table

_WIDTH = 170
_SHAPES = ", ".join(shape for shape in SHAPES if shape not in CUT_IN_WIDTH)


def parallel(
    shape: Annotated[
        str, typer.Option(help=f"One of {_SHAPES}; all but {', '.join(WHOLE)} are one rank's part.")
    ] = "cpu-v4",
    tokens: Annotated[str, typer.Option(help="Comma-separated tokens on every rank.")] = "1,8,32",
    transports: Annotated[str, typer.Option(help=f"{', '.join(TRANSPORTS)}.")] = ",".join(TRANSPORTS),
    arms: Annotated[str, typer.Option(help="folded, dual-stream.")] = "folded,dual-stream",
    schemes: Annotated[str, typer.Option(help="native, slot.")] = "native,slot",
    backend: Annotated[str, typer.Option(help="Of ours; default: hopper where it runs, else auto.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 10,
    inputs: Annotated[int, typer.Option(min=1, help="Sets of inputs to rotate over.")] = 4,
    ranks: Annotated[int, typer.Option(min=0, help="Processes; default: one a GPU, or two without any.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Keep the result, written anew after each number of tokens.")] = None,
) -> None:
    """Time one MoE layer over several ranks, a process each: dispatch, local layer, combine, and all of it."""
    with errors.shown():
        request = ParallelRequest(
            shape,
            numbers("--tokens", tokens),
            names("--transports", transports),
            names("--arms", arms),
            names("--schemes", schemes),
            backend,
            rounds,
            inputs,
            ranks,
        )
        writable("--out", out)
        result = launch.run(request, out)
    console(_WIDTH).print(parallel_table(result))
