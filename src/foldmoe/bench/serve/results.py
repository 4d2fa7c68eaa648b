"""The result of ``foldmoe bench serve``, one JSON file: what was asked, every server, every run, every failure.

Summaries (medians, changes, outliers) are not stored: :mod:`foldmoe.bench.serve.summary` derives them from the runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from foldmoe import result_file
from foldmoe.bench.serve import arms
from foldmoe.bench.serve.workloads import WorkloadSet  # noqa: TC001  a file's fields are checked against it

if TYPE_CHECKING:
    from pathlib import Path

KIND = "bench-serve"
"""What the ``kind`` field of the file says."""

Warm = Literal["all", "largest"]


@dataclass(frozen=True)
class Run:
    """One workload, once, on one server.

    Args:
        arm: name of the arm.
        repeat: counts from 1.
        workload: its name.
        metrics: the client's own numbers under its own names: ``output_throughput`` (tokens/s), ``mean_tpot_ms``,
            ``median_itl_ms``, ``p99_ttft_ms`` ...
        seconds: that the run took.
        completed: requests that were answered, out of ``requested``.
        short: answers with fewer tokens than asked for.
        invalid: why this run does not count; empty for one that does.
        latencies: seconds from request to last token, by request.
        texts: a digest of every answer's text, by request.
        prefix_hits: share of prompt tokens that the server took from its prefix cache; None where it does not say.
        compiled: kernels that the server's log says it compiled or tuned during the run.
        longest_gap: seconds between two tokens of an answer, the most; None in files of before it was kept.
    """

    arm: str
    repeat: int
    workload: str
    metrics: dict[str, float]
    seconds: float
    requested: int
    completed: int
    short: int = 0
    invalid: tuple[str, ...] = ()
    latencies: tuple[float, ...] = ()
    texts: tuple[str, ...] = ()
    prefix_hits: float | None = None
    compiled: tuple[str, ...] = ()
    longest_gap: float | None = None


@dataclass(frozen=True)
class Server:
    """One server, from start to stop.

    Args:
        arm: name of the arm.
        repeat: counts from 1.
        environment: the variables that make the arm; None is a variable that was removed.
        runs_as: what its ranks say that they run; empty where nothing says.
        decisions: lines on what was folded and what was refused, from the ranks' own files.
        notes: other lines worth a reader's time, such as tuned tables that the server did not find.
        versions: of the server's packages.
        start_seconds: from start to healthy.
        model_load_bytes: of one rank, the largest; None where nobody says.
        workspace_bytes: our scratch on one rank, the largest.
        kv_blocks: blocks of the KV cache of one rank, the fewest.
        log: the server's output, relative to the result's folder.
    """

    arm: str
    repeat: int
    environment: dict[str, str | None]
    runs_as: str
    decisions: tuple[str, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    start_seconds: float
    model_load_bytes: int | None
    workspace_bytes: int | None
    kv_blocks: int | None
    log: str


@dataclass(frozen=True)
class Failure:
    """Something that did not run.

    Args:
        arm: name of the arm.
        repeat: counts from 1.
        where: "start", "arm" (the server runs another one than asked), or a workload's name.
        reason: what happened and what to do, for people.
    """

    arm: str
    repeat: int
    where: str
    reason: str


@dataclass
class ServeResult:
    """All of one benchmark; grows while it runs.

    Args:
        serve_cmd: the server's command line.
        client_cmd: the client's, without what workloads add.
        workloads: what clients asked for.
        arms: names, in the order of a round.
        repeats: rounds.
        versions: of the machine that ran the client.
        command: repeats this benchmark.
        noise_arm: the arm that is ``noise_of`` once more; None where the noise floor was not measured.
        complete: every run that was asked for is there and valid.
        warm: what the pass that is not reported runs on a fresh server: every workload, or the largest alone.
    """

    serve_cmd: str
    client_cmd: str
    workloads: WorkloadSet
    arms: tuple[str, ...]
    repeats: int
    versions: dict[str, str]
    command: str = ""
    noise_arm: str | None = None
    noise_of: str | None = None
    servers: list[Server] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    complete: bool = False
    warm: Warm = "all"

    @property
    def served(self) -> tuple[str, ...]:
        """Arms of one round, the one that is served twice included."""
        return (*self.arms, self.noise_arm) if self.noise_arm else self.arms

    def asks_for(self, part: Run | Server) -> bool:
        """Whether the part counts: a file that was resumed with fewer arms or repeats holds the others as well."""
        return part.arm in self.served and part.repeat <= self.repeats

    def save(self, path: Path) -> None:
        """Write the file that :meth:`load` reads."""
        result_file.save(path, KIND, self)

    @classmethod
    def load(cls, path: Path) -> ServeResult:
        """Read a saved result.

        Raises:
            ValueError: a file of another kind, one with an arm that is not there, or a damaged one, with the field at
                fault.
            OSError: no such file.
        """
        found = result_file.load(path, KIND, cls)
        parts: list[Server | Run | Failure] = [*found.servers, *found.runs, *found.failures]
        try:
            for name in (*found.served, *(part.arm for part in parts)):
                arms.find(name)
        except ValueError as error:
            raise ValueError(f"{path}: {error}; was it written by a newer foldmoe?") from error
        return found
