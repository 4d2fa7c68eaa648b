"""``foldmoe bench serve``: works through what a result still lacks, one server after the other."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from foldmoe.bench.serve import arms, schedule
from foldmoe.bench.serve.client import Client, ClientError
from foldmoe.bench.serve.results import Failure, ServeResult
from foldmoe.bench.serve.server import ServerError
from foldmoe.bench.serve.session import Options, serve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from foldmoe.bench.serve.results import Run
    from foldmoe.bench.serve.schedule import Visit

RESULT = "serve.json"
"""The result's file in its folder."""

_MUST_MATCH = ("serve_cmd", "client_cmd", "workloads", "warm", "versions")


@dataclass(frozen=True)
class Event:
    """Progress.

    Args:
        text: what begins now, or what went wrong; empty where there is nothing to say.
        done: steps of the plan that ended, or that will not be taken.
        seconds_left: None while nobody knows.
        wrong: whether the text is a failure.
    """

    text: str
    done: int
    seconds_left: float | None
    wrong: bool = False


def prepare(asked: ServeResult, folder: Path, *, resume: bool) -> ServeResult:
    """The result to work on: ``asked`` as it is, or with the runs that the folder already holds. A folder whose result
    holds none, such as after a command that did not start, is begun anew.

    Raises:
        ValueError: a folder that holds a result and no ``resume``, or one whose runs cannot be compared with new ones.
    """
    path = folder / RESULT
    if not path.exists():
        return asked
    old = ServeResult.load(path)
    if not old.runs:
        return asked
    if not resume:
        raise ValueError(f"{path} exists: --resume continues it, or choose another --out")
    for name in _MUST_MATCH:
        before, now = getattr(old, name), getattr(asked, name)
        if before != now:
            raise ValueError(f"cannot resume {path}: {name} was {before!r}, and now is {now!r}")
    asked.runs, asked.servers = old.runs, old.servers
    return asked


class Runner:
    """Works through a plan.

    Args:
        result: grows, and is saved to ``folder`` after every run.
        folder: for the result, the servers' logs and the client's own files.
        options: how servers and clients are run.
        tell: called with every :class:`Event`.
    """

    def __init__(self, result: ServeResult, folder: Path, options: Options, tell: Callable[[Event], None]) -> None:
        self.result = result
        self._visits = schedule.visits(result)
        self._left = [step for visit in self._visits for step in visit.steps]
        self.steps = len(self._left)
        self._folder, self._options, self._tell = folder, options, tell
        self._client = Client(result.client_cmd, os.environ, options.run_timeout)
        self._clock = schedule.Clock()

    def run(self) -> None:
        """Serve every visit. What fails is noted, and what can go on goes on.

        Raises:
            OSError, ValueError: as :func:`foldmoe.bench.serve.session.serve`.
            KeyboardInterrupt: children were ended, the result is saved.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self.result.failures.clear()  # of an earlier session, whose visits are planned again
        hopeless: set[str] = set()
        try:
            for number, visit in enumerate(self._visits):
                if visit.arm not in hopeless and not self._visit(visit):
                    hopeless.add(visit.arm)  # it would fail again, at minutes a try
                self._left = [step for later in self._visits[number + 1 :] for step in later.steps]
                self._say("")
        finally:
            self.result.complete = not self.result.failures and not schedule.visits(self.result)
            self._save()

    def _visit(self, visit: Visit) -> bool:
        """False where no server can be had that runs the arm."""
        arm, seed = arms.find(visit.arm), self.result.workloads.seed
        label, where, serving, begun = f"{arm.label}, repeat {visit.repeat}", schedule.START, False, time.monotonic()
        self._say(f"{label}: starting a server")
        try:
            with serve(arm, visit.repeat, self.result.serve_cmd, self._client, self._folder, self._options) as session:
                serving = True
                self.result.servers.append(session.record)
                begun = self._took(begun)
                for workload in visit.warm:
                    where = workload.name
                    self._say(f"{label}: {where}, warming up")
                    session.warm(workload, seed)
                    begun = self._took(begun)
                for workload in visit.workloads:
                    where = workload.name
                    self._say(f"{label}: {where}")
                    self._keep(session.measure(workload, seed))
                    begun = self._took(begun)
        except (ServerError, ClientError, arms.ArmError) as error:
            stage = "arm" if isinstance(error, arms.ArmError) else where
            self.result.failures.append(Failure(visit.arm, visit.repeat, stage, str(error)))
            self._save()
            self._say(f"{label}: {error}", wrong=True)
        return serving

    def _keep(self, run: Run) -> None:
        """In place of an invalid one of an earlier session."""
        key = (run.arm, run.repeat, run.workload)
        self.result.runs = [old for old in self.result.runs if (old.arm, old.repeat, old.workload) != key]
        self.result.runs.append(run)
        self._save()
        for reason in run.invalid:
            self._say(
                f"{arms.find(run.arm).label}, repeat {run.repeat}: {run.workload}: does not count: {reason}", wrong=True
            )

    def _took(self, begun: float) -> float:
        """The first step of the plan ended; the next begins at the time returned."""
        now = time.monotonic()
        self._clock.took(self._left.pop(0), now - begun)
        return now

    def _say(self, text: str, *, wrong: bool = False) -> None:
        self._tell(Event(text, self.steps - len(self._left), self._clock.left(self._left), wrong))

    def _save(self) -> None:
        self.result.save(self._folder / RESULT)
