"""``foldmoe plan``: how every MoE layer of a checkpoint would run, and why not better."""

from __future__ import annotations

import json
from typing import Annotated, Any, cast

import typer

import foldmoe.backends  # noqa: F401  registers the backends that the planner asks
from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.planner import FusionPolicy, plan_checkpoint
from foldmoe.report.plan_table import plan_table


def plan(
    path_or_repo: Annotated[str, typer.Argument(help="A folder, a .safetensors file, or a hub repository.")],
    ep: Annotated[int, typer.Option(help="Ranks that share the routed experts.")] = 1,
    tp: Annotated[int, typer.Option(help="Ranks that cut every expert's width.")] = 1,
    device: Annotated[str | None, typer.Option(help="h200, h100, mi355x, cpu, ...; default: what is here.")] = None,
    fold: Annotated[str, typer.Option(help="auto, native, slot, dual, off or stock.")] = "auto",
    activations: Annotated[str, typer.Option(help="checkpoint, bf16, fp8 or fp8_token.")] = "checkpoint",
    backend: Annotated[str, typer.Option(help="auto, or the name of a backend.")] = "auto",
    allow_requantize: Annotated[
        bool, typer.Option("--allow-requantize", help="Let the slot fold lower the shared expert's precision.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Show how every MoE layer of a checkpoint would run. Reads headers only; needs no GPU."""
    with errors.shown():
        policy = FusionPolicy(cast("Any", fold), allow_requantize, cast("Any", activations), backend)
        found = plan_checkpoint(path_or_repo, policy=policy, ep_size=ep, tp_size=tp, device=device)
    if as_json:
        typer.echo(json.dumps(found.as_dict(), indent=2))
    else:
        console().print(plan_table(found))
