"""``foldmoe bench``: speed A/B."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foldmoe.bench import layer as bench_layer
from foldmoe.bench.compare import FEWEST_ROUNDS, compare
from foldmoe.bench.peers import PEERS
from foldmoe.bench.result import LayerResult, Request
from foldmoe.bench.shapes import SHAPES
from foldmoe.cli import errors
from foldmoe.cli.bench_merge import merged
from foldmoe.cli.bench_parallel import parallel
from foldmoe.cli.bench_serve import serve
from foldmoe.cli.console import console
from foldmoe.cli.files import writable
from foldmoe.cli.names import names
from foldmoe.cli.numbers import numbers
from foldmoe.report.bench_table import bench_table
from foldmoe.report.compare_table import compare_table

app = typer.Typer(help="Speed A/B, arms interleaved.", no_args_is_help=True)
app.command("serve")(serve)
app.command("merge")(merged)
app.command("parallel")(parallel)


@app.command("layer")
def layer(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(SHAPES)}.")] = "cpu",
    tokens: Annotated[str, typer.Option(help="Comma-separated numbers of rows.")] = "1,16,256",
    arms: Annotated[str, typer.Option(help="folded, dual-stream, serial, stock.")] = "folded,dual-stream,serial,stock",
    backend: Annotated[str, typer.Option(help="auto, or the name of a backend.")] = "auto",
    activations: Annotated[str, typer.Option(help="checkpoint, bf16, fp8 or fp8_token.")] = "checkpoint",
    rounds: Annotated[int, typer.Option(help="Rounds that count.")] = 20,
    device: Annotated[str | None, typer.Option(help="A torch device; default: the GPU if there is one.")] = None,
    inputs: Annotated[int, typer.Option(help="Sets of inputs to rotate over.")] = 8,
    peers: Annotated[str, typer.Option(help=f"Other libraries, also timed: {', '.join(PEERS)}.")] = "",
    out: Annotated[Path | None, typer.Option(help="Write the result, for --compare and 'foldmoe report'.")] = None,
    against: Annotated[
        Path | None, typer.Option("--compare", help="An earlier result; exit 1 where a row is slower than the noise.")
    ] = None,
) -> None:
    """Time one MoE layer: our arms, other libraries, and Transformers' experts where weights are bf16.

    Exit status 1 where nothing was timed or a number of tokens failed; rows timed before it are shown and written.
    """
    screen, stopped = console(), ""
    with errors.shown():
        old = LayerResult.load(against) if against else None
        request = Request(
            shape,
            numbers("--tokens", tokens),
            names("--arms", arms),
            backend,
            rounds,
            inputs,
            activations=activations,
            device=device,
            peers=names("--peers", peers) if peers else (),
        )
        writable("--out", out)
        with screen.status("timing") as status:
            try:
                result = bench_layer.run(request, status.update)
            except bench_layer.StoppedError as error:
                result, stopped = error.result, str(error)
    screen.print(bench_table(result))
    if not result.rows:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in result.refused.items())
        errors.failed(f"nothing was timed: {reasons}")
    with errors.shown():
        if out:
            result.save(out)
        if stopped:
            errors.failed(stopped)
        found = compare(old, result) if old else None
        if found:
            screen.print(compare_table(found, str(against)))
            if not found.compared:
                raise ValueError(
                    f"nothing was judged: expected at least {FEWEST_ROUNDS} rounds in both results, below which noise "
                    f"is unknown; measure again with more --rounds"
                )
    if found and found.regressions:
        raise typer.Exit(1)
