"""``foldmoe demo``: the main job on a small DeepSeek-V4 checkpoint, in three minutes, without a GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from foldmoe import demo as logic
from foldmoe.cli import errors
from foldmoe.cli.console import Bars, console
from foldmoe.report.demo_table import demo_answers, demo_table
from foldmoe.report.plan_table import plan_table


def demo(
    items: Annotated[int, typer.Option(help="Items a task.")] = 50,
    device: Annotated[str | None, typer.Option(help="A torch device; default: the GPU if there is one.")] = None,
) -> None:
    """Plan a DeepSeek-V4 checkpoint, run it unfolded, folded natively and folded into a slot, and compare."""
    screen = console()
    with errors.shown(), Bars(screen) as bars:
        result = logic.run(bars, items=items, device=device)
    screen.print(plan_table(result.plan))
    if result.trained:
        screen.print(demo_answers(result))
    screen.print(demo_table(result))
