"""``foldmoe bench serve``: a served model in several arms."""

from __future__ import annotations

import shlex
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, cast, get_args

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from foldmoe.bench import versions
from foldmoe.bench.serve import arms as arms_of_serve
from foldmoe.bench.serve import workloads as workload_files
from foldmoe.bench.serve.processes import terminated_as_interrupted
from foldmoe.bench.serve.results import ServeResult, Warm
from foldmoe.bench.serve.runner import RESULT, Event, Runner, prepare
from foldmoe.bench.serve.session import Options
from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.planner.devices import torch_device
from foldmoe.report.serve_table import serve_table

_INTERRUPTED = 130


def serve(
    context: typer.Context,
    serve_cmd: Annotated[str, typer.Option(help="The server's command line; {port} is filled in, or --port added.")],
    out: Annotated[Path, typer.Option(help="Folder for the result, logs and the client's files.")],
    workloads: Annotated[
        str, typer.Option(help=f"A JSON file, or one of {', '.join(workload_files.presets())}.")
    ] = "native-fold",
    arms: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(arms_of_serve.ARMS)}.")] = ",".join(
        arms_of_serve.DEFAULT
    ),
    repeats: Annotated[int, typer.Option(min=1, help="Rounds; every round serves every arm once.")] = 3,
    noise: Annotated[
        str, typer.Option(help="Arm that is served twice a round, for the noise floor; 'none' saves that time.")
    ] = "auto",
    warm: Annotated[
        str, typer.Option(help="What a fresh server runs before anything counts: all workloads, or the largest alone.")
    ] = "all",
    client_cmd: Annotated[
        str, typer.Option(help="The client's command line; add --tokenizer or --trust-remote-code here.")
    ] = "vllm bench serve",
    port: Annotated[int, typer.Option(min=1, max=65535, help="That servers listen on.")] = 8000,
    ready_timeout: Annotated[float, typer.Option(help="Seconds that a server may take to become healthy.")] = 1800.0,
    run_timeout: Annotated[float, typer.Option(help="Seconds that one run of a workload may take.")] = 7200.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue what the folder already holds.")] = False,
) -> None:
    """Serve a model in every arm, on a fresh server each time, and compare what clients saw.

    Exit status: 0 if every run is there and valid, 1 if not, 130 after Ctrl-C; the folder keeps what was measured, and
    --resume continues.
    """
    screen = console()
    with errors.shown():
        chosen = arms_of_serve.parse(arms)
        again = ("serial" if "serial" in chosen else chosen[0]) if noise == "auto" else noise
        if again not in (*chosen, "none"):
            raise ValueError(f"--noise names an arm of --arms, or none; found {again!r}")
        if warm not in get_args(Warm):
            raise ValueError(f"--warm is {' or '.join(get_args(Warm))}; found {warm!r}")
        twice = None if again == "none" else again
        asked = ServeResult(
            serve_cmd,
            client_cmd,
            workload_files.load(workloads),
            chosen,
            repeats,
            versions.collect(torch_device(None)),
            _command(context),
            noise_arm=twice and twice + arms_of_serve.AGAIN,
            noise_of=twice,
            warm=cast("Warm", warm),
        )
        result = prepare(asked, out, resume=resume)
    end = _run(result, out, Options(port, ready_timeout, run_timeout), screen)
    screen.print(serve_table(result))
    if end.message:
        screen.print(end.message, markup=False, highlight=False)
    if end.status:
        raise typer.Exit(end.status)


@dataclass(frozen=True)
class _End:
    status: int = 0
    message: str = ""


def _run(result: ServeResult, out: Path, options: Options, screen: Console) -> _End:
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), _TimeLeft())
    with Progress(*columns, console=screen) as bar, terminated_as_interrupted():
        task = bar.add_task("serving", total=None, end=None)

        def tell(event: Event) -> None:
            seconds = event.seconds_left
            bar.update(task, completed=event.done, end=None if seconds is None else time.monotonic() + seconds)
            if event.text and not event.wrong:
                bar.update(task, description=event.text)
            if event.wrong:
                screen.print(event.text, markup=False, highlight=False)
            elif event.text and not screen.is_terminal:  # a log has no bar
                screen.print(f"{event.text} ({_left(seconds)})", markup=False, highlight=False)

        def kept() -> str:
            measured = result.runs and (out / RESULT).exists()
            return f"; {out / RESULT} keeps what was measured, --resume continues" if measured else ""

        try:
            runner = Runner(result, out, options, tell)
            bar.update(task, total=runner.steps)
            runner.run()
        except KeyboardInterrupt:
            return _End(_INTERRUPTED, f"foldmoe: interrupted; servers were ended{kept()}")
        except (OSError, ValueError) as error:
            return _End(2, f"foldmoe: {error}{kept()}")
    if not result.complete:
        return _End(1, f"foldmoe: runs are missing or invalid, see above{kept()}")
    return _End()


class _TimeLeft(ProgressColumn):
    """Counts down between events, which may be hours apart."""

    def render(self, task: Task) -> Text:
        end = task.fields["end"]
        return Text(_left(None if end is None else max(end - time.monotonic(), 0.0)))


def _left(seconds: float | None) -> str:
    return "time left unknown" if seconds is None else f"{timedelta(seconds=round(seconds))} left"


def _command(context: typer.Context) -> str:
    """What was typed, less --resume."""
    words = ["foldmoe", "bench", "serve"]
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name != "resume":
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
