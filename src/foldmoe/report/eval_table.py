"""Accuracy by arm, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from foldmoe.evaluate.arms import ArmScore


def eval_table(scores: list[ArmScore], source: str) -> Table:
    """One row an arm: score with its standard error, answers alike, answers that flipped, by task."""
    count = len(next(iter(scores[0].answers.values())).items)
    table = Table(title=f"{source}, {count} items a task, greedy", title_justify="left")
    table.add_column("arm")
    for task in scores[0].answers:
        for heading in (task, "same answers", "lost, won"):
            table.add_column(heading, justify="right")
    for row in scores:
        cells = [row.arm]
        for task, answers in row.answers.items():
            error = (answers.score * (1 - answers.score) / count) ** 0.5
            lost, won = row.flips[task]
            cells += [f"{answers.score:.1%} ± {error:.1%}", f"{row.same[task]}/{count}", f"{lost}, {won}"]
        table.add_row(*cells)
    return table
