"""``foldmoe warmup``: compile ahead all kernels that a checkpoint's plan needs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.cli.numbers import numbers
from foldmoe.cli.policy import asked
from foldmoe.options import in_range
from foldmoe.planner import plan_checkpoint
from foldmoe.planner.devices import KNOWN
from foldmoe.warming import Calls, Report, compile_ahead, sizes

if TYPE_CHECKING:
    from foldmoe.planner import CheckpointPlan, LayerPlan


def warmup(
    path_or_repo: Annotated[str, typer.Argument(help="A folder, a .safetensors file, or a hub repository.")],
    tokens: Annotated[
        str | None, typer.Option(help="Comma-separated batch sizes; default: all to --max-tokens.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest batch, in tokens that reach a rank.")] = 8192,
    ep: Annotated[int, typer.Option(help="Ranks that share the routed experts.")] = 1,
    tp: Annotated[int, typer.Option(help="Ranks that cut every expert's width.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="h200, a100, mi300x, ...; it need not be here. Default: the GPU that is.")
    ] = None,
    fold: Annotated[str | None, typer.Option(help="auto, native, slot, dual, off or stock.")] = None,
    activations: Annotated[str | None, typer.Option(help="checkpoint, bf16, fp8 or fp8_token.")] = None,
    backend: Annotated[str | None, typer.Option(help="auto, or the name of a backend.")] = None,
    allow_requantize: Annotated[
        bool | None, typer.Option("--allow-requantize", help="Let the slot fold lower the shared expert's precision.")
    ] = None,
    on_device: Annotated[
        str, typer.Option(help="Arguments given as device tensors: num_valid_tokens,shared_rows.")
    ] = "",
    processes: Annotated[
        int | None, typer.Option(min=1, help="Compile in so many processes; default: one a CPU.")
    ] = None,
) -> None:
    """Compile all kernels that a checkpoint's layers launch, in parallel.

    They are kept in FOLDMOE_CACHE_DIR, or Triton's own folder, for this version of Triton and of foldmoe alone. Reads
    headers only. What is not given here is taken from FOLDMOE_FOLD and its like, as a server would.
    """
    with errors.shown():
        policy = asked(fold=fold, activations=activations, backend=backend, allow_requantize=allow_requantize)
        counts = sizes(max_tokens) if tokens is None else numbers("--tokens", tokens)
        in_range(1, tokens=counts)
        calls = Calls(counts, on_device=tuple(name for name in on_device.split(",") if name))
        found = plan_checkpoint(path_or_repo, policy=policy, ep_size=ep, tp_size=tp, device=device)
        if found.device.kind == "cpu":
            raise ValueError(
                "no GPU to compile for: a CPU runs layers without kernels. Name one that need not be here: --device "
                f"{', '.join(name for name in KNOWN if name != 'cpu')}"
            )
        report = _compile(found, calls, processes)
    if not report.folder:
        console().print(f"nothing to compile: {found.summary}")
        return
    console().print(
        f"{len(report.compiled)} kernels compiled, {len(report.cached)} in cache already, for {report.device}, "
        f"in {report.seconds:.0f} s, kept in {report.folder}",
        highlight=False,
        soft_wrap=True,
    )


def _compile(found: CheckpointPlan, calls: Calls, processes: int | None) -> Report:
    label = TextColumn("{task.description:22}", markup=False)
    columns = (label, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console(), transient=True) as bar:
        task = bar.add_task("looking", total=None)

        def progress(done: int, total: int, line: str) -> None:
            bar.update(task, completed=done, total=total, description=line)

        return compile_ahead(_every_rank(found), calls, found.device, processes=processes, progress=progress)


def _every_rank(found: CheckpointPlan) -> list[LayerPlan]:
    """Rank 0's layers, and the last rank's, which holds an expert less where they do not divide evenly."""
    place = found.placement
    last = replace(place, ep_rank=place.ep_size - 1)
    uneven = [plan for plan in found.layers if plan.spec.routed.count % place.ep_size]
    return [*found.layers, *(replace(plan, placement=last) for plan in uneven)]
