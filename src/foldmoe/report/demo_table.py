"""What the demo found, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from foldmoe.demo import ArmResult, DemoResult

_SHOWN = 2


def demo_table(result: DemoResult) -> RenderableType:
    """One row an arm."""
    table = Table(title="the same checkpoint, three ways", title_justify="left")
    table.add_column("how")
    table.add_column("folded")
    for heading in ("worst layer error", "needle", "arithmetic", "tokens as serial", "expert bytes"):
        table.add_column(heading, justify="right")
    for arm in result.arms:
        table.add_row(*_cells(arm))
    notes = ["error: against the float64 reference and against the unfolded run; bf16 output alone gives about 2e-3"]
    if not result.trained:
        notes.append("random weights from a fixed seed: there is nothing to ask this model")
    return Group(table, *(Text(note) for note in notes))


def _cells(arm: ArmResult) -> tuple[str, ...]:
    scores = [f"{arm.answers[task].score:.0%}" if task in arm.answers else "" for task in ("needle", "arithmetic")]
    same, total = arm.same
    return (
        arm.arm,
        arm.folded,
        f"{arm.worst_error:.1e}",
        *scores,
        f"{same:,}/{total:,}" if total else "",
        f"{arm.resident:,}",
    )


def demo_answers(result: DemoResult) -> RenderableType:
    """The first answers of every task, arm by arm."""
    table = Table(title="answers", title_justify="left", show_lines=True)
    table.add_column("asked", overflow="fold", max_width=60)
    for arm in result.arms:
        table.add_column(arm.arm, overflow="fold")
    for task, first in result.arms[0].answers.items():
        for index in range(min(_SHOWN, len(first.items))):
            asked = first.items[index].prompt
            short = asked if len(asked) < 220 else f"{asked[:100]} ... {asked[-80:]}"
            table.add_row(short.strip(), *(arm.answers[task].texts[index].strip() for arm in result.arms))
    return table
