"""``foldmoe plan``: how every MoE layer of a checkpoint would run, and why not better."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

import foldmoe
import foldmoe.backends  # registers the backends that the planner asks
from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.cli.numbers import numbers
from foldmoe.cli.policy import asked
from foldmoe.options import in_range
from foldmoe.parallel.estimate import estimate as estimated
from foldmoe.parallel.kernel_times import EFFICIENCY, Measured
from foldmoe.parallel.scheme import largest_buffers
from foldmoe.planner import FusionPolicy, plan_checkpoint
from foldmoe.report.estimate_table import estimate_table
from foldmoe.report.plan_table import buffer_line, plan_table


def plan(
    path_or_repo: Annotated[str, typer.Argument(help="A folder, a .safetensors file, or a hub repository.")],
    ep: Annotated[int, typer.Option(help="Ranks that share the routed experts.")] = 1,
    tp: Annotated[int, typer.Option(help="Ranks that cut every expert's width.")] = 1,
    device: Annotated[str | None, typer.Option(help="h200, h100, mi355x, cpu, ...; default: what is here.")] = None,
    fold: Annotated[str | None, typer.Option(help="auto, native, slot, dual, off or stock.")] = None,
    activations: Annotated[str | None, typer.Option(help="checkpoint, bf16, fp8 or fp8_token.")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, or the name of a backend.")] = None,
    allow_requantize: Annotated[
        bool | None, typer.Option("--allow-requantize", help="Let the slot fold lower the shared expert's precision.")
    ] = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="Expected times over the --ep ranks.")] = False,
    tokens: Annotated[
        str, typer.Option(help="Tokens on every rank, with commas: of the estimate; the most, of buffers.")
    ] = "1,8,32,128,512,2048",
    link: Annotated[
        str | None, typer.Option(help="Estimate: nvlink, ib400, or GB/s a direction; default: nvlink.")
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(help=f"Estimate: of local kernels against their floor; default: fitted, or {EFFICIENCY}."),
    ] = None,
    measured: Annotated[
        Path | None, typer.Option(help="Estimate: local times from 'foldmoe bench layer --out' of one rank's layer.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Show how every MoE layer of a checkpoint would run. Reads headers only; needs no GPU.

    What is not given here is taken from FOLDMOE_FOLD and its like, as a server would.
    """
    of_estimate = {"--link": link, "--efficiency": efficiency, "--measured": measured}
    with errors.shown():
        if not estimate and (stray := [name for name, given in of_estimate.items() if given is not None]):
            raise ValueError(f"{', '.join(stray)} without --estimate: only an estimate takes that")
        policy = asked(fold=fold, activations=activations, backend=backend, allow_requantize=allow_requantize)
        found = plan_checkpoint(path_or_repo, policy=policy, ep_size=ep, tp_size=tp, device=device)
        expected, buffers = None, {}
        counts = numbers("--tokens", tokens)
        in_range(1, tokens=counts)
        if estimate:
            table = Measured.read(measured) if measured else None
            way = "nvlink" if link is None else link
            expected = estimated(found, counts, link=way, efficiency=efficiency, measured=table)
        elif ep > 1 and tp == 1:
            buffers = largest_buffers(found.layers, max(counts))
    if as_json:
        extra: dict[str, Any] = {
            "command": _command(path_or_repo, policy, {"ep": ep, "tp": tp, "device": device}),
            "versions": {"foldmoe": foldmoe.__version__},
        }
        if expected:
            extra["estimate"] = expected.as_dict()
        elif buffers:
            extra["buffers"] = buffers
        typer.echo(json.dumps(found.as_dict() | extra, indent=2))
        return
    console().print(plan_table(found))
    if expected:
        console().print(estimate_table(found, expected))
    elif buffers:
        console().print(buffer_line(buffers, max(counts)), highlight=False)


def _command(path_or_repo: str, policy: FusionPolicy, options: dict[str, Any]) -> str:
    """The command that plans the same again, whatever the environment then says."""
    words = ["foldmoe", "plan", path_or_repo]
    for name, value in (options | asdict(policy)).items():
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value not in (None, False):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--json"])
