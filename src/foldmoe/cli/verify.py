"""``foldmoe verify``: does every MoE layer compute what its checkpoint says?"""

from __future__ import annotations

from typing import Annotated

import typer

from foldmoe.checkpoint import read_headers
from foldmoe.checkpoint.compare import compare
from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.cli.policy import asked
from foldmoe.report.check_tables import compare_table, verify_table
from foldmoe.verify import passes
from foldmoe.verify import verify as check


def verify(
    checkpoint: Annotated[str, typer.Argument(help="A folder, or a .safetensors file.")],
    against: Annotated[
        str | None, typer.Option(help="The checkpoint that this one was made from: compare their experts too.")
    ] = None,
    fold: Annotated[str | None, typer.Option(help="How the folded run folds: auto, native or slot.")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, or the name of a backend.")] = None,
    allow_requantize: Annotated[bool | None, typer.Option("--allow-requantize")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Rows of random input.")] = 16,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1)] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: the GPU if there is one.")
    ] = None,
) -> None:
    """Run every MoE layer folded, unfolded and against the float64 reference.

    Exit status 1 if one of them disagrees, or a fold that was asked for by name was not run.
    """
    screen = console()
    with errors.shown():
        policy = asked(fold=fold, backend=backend, allow_requantize=allow_requantize)
        found = check(checkpoint, policy=policy, tokens=tokens, seed=seed, device=device)
        if against:
            read_headers(against)  # a wrong path is said before every layer is run
        checks = list(found)
        differences = list(compare(checkpoint, against)) if against else []
    screen.print(verify_table(checks))
    if against:
        screen.print(compare_table(differences))
    if not passes(checks) or not all(d.ok for d in differences):
        raise typer.Exit(1)
