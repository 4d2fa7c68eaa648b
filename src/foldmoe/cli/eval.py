"""``foldmoe eval``: accuracy A/B, arms asked the same questions, with paired statistics."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foldmoe.bench.serve import ranks
from foldmoe.bench.versions import collect
from foldmoe.cli import errors
from foldmoe.cli.console import Bars, console
from foldmoe.cli.files import writable
from foldmoe.cli.names import names
from foldmoe.cli.numbers import numbers
from foldmoe.evaluate.arms import ARMS
from foldmoe.evaluate.presets import PRESETS
from foldmoe.evaluate.request import OWN_TASKS, from_options
from foldmoe.evaluate.run import run
from foldmoe.planner.devices import torch_device
from foldmoe.report.eval_table import eval_report

if TYPE_CHECKING:
    from foldmoe.evaluate.result import EvalResult

_USUAL_ARMS = "serial,native,slot-requantized,transformers,shared-zeroed,routed-zeroed"


def evaluate(
    checkpoint: Annotated[
        str | None, typer.Argument(help="A local checkpoint; default: tiny-v4. With --server: what is served.")
    ] = None,
    arms: Annotated[str | None, typer.Option(help=f"In process: {', '.join(ARMS)}.")] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(help="A served arm: native=http://localhost:8000/v1; repeat it."),
    ] = None,
    state_dir: Annotated[
        list[str] | None, typer.Option(help="ARM=FOLDER: FOLDMOE_STATE_DIR of a served arm, to read what it runs.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option(help=f"{', '.join(OWN_TASKS)}, or any of lm-eval's and foldmoe_*.")
    ] = None,
    preset: Annotated[str | None, typer.Option(help=f"A published protocol: {', '.join(PRESETS)}.")] = None,
    items: Annotated[int | None, typer.Option(help="Items a task; default: 200 of our own, all of lm-eval's.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of our own tasks' items; with lm-eval, of sampling and few-shot examples too.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="New tokens an answer; default: the task's.")] = None,
    shots: Annotated[int | None, typer.Option(help="Examples before the question; default: the task's.")] = None,
    chat: Annotated[bool | None, typer.Option("--chat/--no-chat", help="Through the chat template.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests in flight to a server.")] = None,
    batch: Annotated[int | None, typer.Option(help="Prompts at a time in process.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Of RULER's texts, in tokens: 4096,8192.")] = None,
    think_end: Annotated[str | None, typer.Option(help="What ends thinking, where a server leaves it in.")] = None,
    margin: Annotated[float | None, typer.Option(help="A difference within this share counts as equal.")] = None,
    device: Annotated[str | None, typer.Option(help="A torch device; default: the GPU if there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write every answer and score as JSON.")] = None,
) -> None:
    """Ask the same questions in every arm; say whether the answers differ by more than chance."""
    screen = console()
    with errors.shown():
        served, states = _pairs("--server", server), _pairs("--state-dir", state_dir)
        request = from_options(
            checkpoint=checkpoint,
            arms=_names("--arms", _USUAL_ARMS if arms is None and not served else arms),
            server=served or None,
            state_dir=states or None,
            tasks=_names("--tasks", tasks),
            preset=preset,
            items=items,
            seed=seed,
            max_tokens=max_tokens,
            shots=shots,
            chat=chat,
            concurrency=concurrency,
            batch=batch,
            lengths=None if lengths is None else numbers("--lengths", lengths),
            think_end=think_end,
            margin=margin,
            device=device,
        )
        runs = {arm: _runs(arm, Path(folder)) for arm, folder in request.state_dir.items()}
        target = torch_device(device)
        versions = collect(target, "lm_eval", "scipy")
        writable("--out", out)
        kept: list[EvalResult] = []

        def keep(result: EvalResult) -> None:
            if out:
                result.save(out)
            kept.append(result)

        try:
            with Bars(screen) as bars:
                run(request, bars, versions=versions, states=runs, finished=keep)
        except BaseException:  # Ctrl-C and a full GPU too: every arm took its time
            if kept:
                typer.echo(_unfinished(kept[-1], out), err=True)
                with suppress(ValueError):  # what ended the run says more than that two arms cannot be paired
                    screen.print(eval_report(kept[-1]))
            raise
        screen.print(eval_report(kept[-1]))


def _unfinished(result: EvalResult, out: Path | None) -> str:
    request, names = result.request, ", ".join(arm.arm for arm in result.arms)
    failed = (*request.arms, *request.server)[len(result.arms)]
    where = f"{out} holds" if out else "the tables show"
    return f"foldmoe: arm {failed} did not finish; {where} those that did: {names}"


def _names(option: str, text: str | None) -> tuple[str, ...] | None:
    return None if text is None else names(option, text)


def _pairs(option: str, given: list[str] | None) -> dict[str, str]:
    pairs = {}
    for entry in given or ():
        name, _, value = entry.partition("=")
        if not name or not value:
            raise ValueError(f"{option} takes ARM=VALUE, found {entry!r}")
        pairs[name] = value
    return pairs


def _runs(arm: str, folder: Path) -> str:
    """What a server's ranks say they run, in one line."""
    found = ranks.read(folder)
    if not found:
        raise ValueError(f"arm {arm}: no rank wrote to {folder}; start the server with FOLDMOE_STATE_DIR={folder}")
    if differing := ranks.different_plans(found):
        raise ValueError(
            f"arm {arm}: the ranks in {folder} run different plans ({differing}); is it left from another server?"
        )
    return f"{ranks.together(found).decisions()[0]}, {len(found)} rank{'s'[: len(found) > 1]}"
