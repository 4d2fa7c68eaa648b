"""``foldmoe eval``: accuracy A/B on tiny-v4's skills."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.demo import TINY_V4
from foldmoe.evaluate.arms import ARMS, compare
from foldmoe.report.eval_table import eval_table


def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of tiny-v4's family.")] = TINY_V4,
    arms: Annotated[str, typer.Option(help=f"Of {', '.join(ARMS)}.")] = ",".join(ARMS),
    items: Annotated[int, typer.Option(help="Items a task.")] = 200,
    device: Annotated[str | None, typer.Option(help="A torch device; default: the GPU if there is one.")] = None,
) -> None:
    """Ask the same questions in every arm and compare the answers with the unfolded run's."""
    screen = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with errors.shown(), Progress(*columns, console=screen) as progress:

        def bar(arm: str, task: str, total: int) -> Callable[[int], None]:
            number = progress.add_task(f"{arm}: {task}", total=total)
            return lambda done: progress.advance(number, done)

        scores = compare(checkpoint, arms.split(","), items=items, device=device, progress=bar)
    screen.print(eval_table(scores, checkpoint.name))
