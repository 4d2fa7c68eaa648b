"""In which order things happen, and how long what is left will take."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.bench.serve.results import ServeResult
    from foldmoe.bench.serve.workloads import Workload

START = "start"


@dataclass(frozen=True)
class Step:
    """What takes time: a server's start, or one pass of one workload.

    Args:
        name: :data:`START`, or the workload's.
        cost: a workload's :attr:`~foldmoe.bench.serve.workloads.Workload.steps`; 0 for a start.
    """

    name: str
    cost: float = 0.0


@dataclass(frozen=True)
class Visit:
    """One server.

    Args:
        arm: its name.
        repeat: counts from 1.
        workloads: that it still has to run.
        warm: those of the pass before, which is not reported.
    """

    arm: str
    repeat: int
    workloads: tuple[Workload, ...]
    warm: tuple[Workload, ...]

    @property
    def steps(self) -> list[Step]:
        """The start, the pass that warms, and the one that counts."""
        return [Step(START), *(Step(workload.name, workload.steps) for workload in (*self.warm, *self.workloads))]


def visits(result: ServeResult) -> list[Visit]:
    """Arms interleaved: every round serves all of them, every second one backwards, A1 B1 C1 C2 B2 A2 ..., so that from
    two rounds on none always comes first. Valid runs that are there are not repeated.
    """
    done = {(run.arm, run.repeat, run.workload) for run in result.runs if not run.invalid}
    planned = []
    for repeat in range(1, result.repeats + 1):
        for arm in result.served if repeat % 2 else reversed(result.served):
            left = tuple(w for w in result.workloads.workloads if (arm, repeat, w.name) not in done)
            if left:
                warm = left if result.warm == "all" else (max(left, key=lambda workload: workload.tokens),)
                planned.append(Visit(arm, repeat, left, warm))
    return planned


class Clock:
    """Guesses the time left from what steps of the same name took; a workload never seen costs what its steps do."""

    def __init__(self) -> None:
        self._seen: dict[str, list[float]] = {}
        self._rates: list[float] = []

    def took(self, step: Step, seconds: float) -> None:
        """Note a step that ended."""
        self._seen.setdefault(step.name, []).append(seconds)
        if step.cost:
            self._rates.append(seconds / step.cost)

    def left(self, steps: Sequence[Step]) -> float | None:
        """Seconds; None before anything of the kind has been seen."""
        total = 0.0
        for step in steps:
            if step.name in self._seen:
                total += statistics.median(self._seen[step.name])
            elif step.cost and self._rates:
                total += step.cost * statistics.median(self._rates)
            else:
                return None
        return total
