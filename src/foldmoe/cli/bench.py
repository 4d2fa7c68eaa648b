"""``foldmoe bench``: speed A/B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from foldmoe.bench import layer as bench_layer
from foldmoe.bench.shapes import SHAPES
from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.report.bench_table import bench_table

app = typer.Typer(help="Speed A/B, arms interleaved.", no_args_is_help=True)


@app.callback()
def _commands() -> None:
    """Keep subcommands even while there is one."""


@app.command("layer")
def layer(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "cpu",
    tokens: Annotated[str, typer.Option(help="Comma-separated numbers of rows.")] = "1,16,256",
    arms: Annotated[str, typer.Option(help="folded, dual-stream, serial, stock.")] = "folded,dual-stream,serial,stock",
    backend: Annotated[str, typer.Option(help="auto, or the name of a backend.")] = "auto",
    activations: Annotated[str, typer.Option(help="checkpoint, bf16, fp8 or fp8_token.")] = "checkpoint",
    rounds: Annotated[int, typer.Option(help="Rounds that count.")] = 20,
    device: Annotated[str | None, typer.Option(help="A torch device; default: the GPU if there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.")] = None,
) -> None:
    """Time one MoE layer: our arms over the same weights, and Transformers' own experts where weights are bf16."""
    screen = console()
    with errors.shown():
        request = bench_layer.Request(
            shape,
            tuple(int(part) for part in tokens.split(",")),
            tuple(arms.split(",")),
            backend,
            rounds,
            activations=activations,
            device=device,
        )
        with screen.status("timing") as status:
            result = bench_layer.run(request, status.update)
    screen.print(bench_table(result))
    if out:
        out.write_text(json.dumps(result.as_dict(), indent=1))
