"""``foldmoe demo``: the main job on a small DeepSeek-V4 checkpoint, in three minutes, without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from foldmoe import demo as logic
from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.report.demo_table import demo_answers, demo_table
from foldmoe.report.plan_table import plan_table


class _Bars:
    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def step(self, label: str, total: int) -> Callable[[int], None]:
        task = self._progress.add_task(label, total=total)
        return lambda done: self._progress.advance(task, done)


def demo(
    items: Annotated[int, typer.Option(help="Items a task.")] = 50,
    device: Annotated[str | None, typer.Option(help="A torch device; default: the GPU if there is one.")] = None,
) -> None:
    """Plan a DeepSeek-V4 checkpoint, run it unfolded, folded natively and folded into a slot, and compare."""
    screen = console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with errors.shown(), Progress(*columns, console=screen) as progress:
        result = logic.run(_Bars(progress), items=items, device=device)
    screen.print(plan_table(result.plan))
    if result.trained:
        screen.print(demo_answers(result))
    screen.print(demo_table(result))
