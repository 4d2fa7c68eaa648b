"""Where commands print tables."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

_PIPED_WIDTH = 120


def console(piped_width: int = _PIPED_WIDTH) -> Console:
    """A console as wide as the terminal; a pipe or a file, which has no width, gets room for every column.

    Args:
        piped_width: of a pipe or file, in characters.

    Nothing is read as markup: paths and names of layers, arms and models may hold brackets and colons.
    """
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=piped_width if piped else None, markup=False, emoji=False)


class Bars:
    """A progress bar a step, below each other; where no terminal draws them, a line as each step begins.

    Args:
        screen: where they are drawn; use as a context manager.
    """

    def __init__(self, screen: Console) -> None:
        label = TextColumn("{task.description}", markup=False)
        columns = (label, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=screen, disable=not screen.is_terminal)

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def step(self, label: str, total: int | None) -> Callable[[int], None]:
        """Begin a step of ``total`` units (None: unknown); call the result with the units done since the last call."""
        if self._progress.disable:
            self._progress.console.print(label if total is None else f"{label}, {total}", markup=False, highlight=False)
        task = self._progress.add_task(label, total=total)
        return lambda done: self._progress.advance(task, done)
