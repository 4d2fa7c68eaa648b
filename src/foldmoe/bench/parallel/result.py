"""What ``foldmoe bench parallel`` was asked and found, and the file that keeps both."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foldmoe import result_file

if TYPE_CHECKING:
    from pathlib import Path

KIND = "bench-parallel"

TRANSPORTS = {"allgather": "all_gather", "alltoall": "all_to_all", "symmetric": "symmetric"}
"""Names on the command line, and the strategy of :class:`foldmoe.parallel.ExpertParallelMoE` behind each."""


@dataclass(frozen=True)
class ParallelRequest:
    """What to time. Each field is an option of the command, under the same name.

    Args:
        shape: a key of :data:`foldmoe.bench.shapes.SHAPES`: those of ``WHOLE`` are cut over the ranks.
        tokens: on every rank.
        transports: of :data:`TRANSPORTS`.
        arms: folded, dual-stream.
        schemes: native, slot (which is always folded).
        backend: ours; "" for Hopper's where it runs, else "auto".
        rounds: that count, at most; slow steps take fewer.
        inputs: sets of inputs to rotate over.
        ranks: processes; 0 for one a GPU, or two without any.
    """

    shape: str
    tokens: tuple[int, ...]
    transports: tuple[str, ...] = tuple(TRANSPORTS)
    arms: tuple[str, ...] = ("folded", "dual-stream")
    schemes: tuple[str, ...] = ("native", "slot")
    backend: str = ""
    rounds: int = 10
    inputs: int = 4
    ranks: int = 0

    @property
    def command(self) -> str:
        """The command line that asks for the same; fields at their default are left out."""
        return result_file.command(("foldmoe", "bench", "parallel"), self)


@dataclass(frozen=True)
class ParallelRow:
    """One way to run one number of tokens; seconds are those of the slowest rank.

    Args:
        transport, scheme, arm: see :class:`ParallelRequest`.
        dispatch, local, combine: medians of each phase on its own.
        total: median of the whole layer; low and high beside it.
        graph: replayed as CUDA graphs; else called from the host each time.
        sent: bytes of tokens and results that one rank must send, on average.
        bound: seconds of the folded local layer, and of the bytes that no transport saves at the measured link.
        predicted: seconds of ``foldmoe plan --estimate`` for the same ranks; None without figures for the device.
        same_bits: output equal to the all-gather's of the same scheme and arm; None where that did not run.
        skew: the slower rank's local launch, input by input, over ``local``: how long ranks that got fewer experts
            wait for the others, which is no communication.
    """

    tokens: int
    transport: str
    scheme: str
    arm: str
    dispatch: float
    local: float
    combine: float
    total: float
    low: float
    high: float
    graph: bool
    sent: int
    bound: float | None
    predicted: float | None
    same_bits: bool | None
    skew: float = 1.0

    @property
    def overlap(self) -> float:
        """Share of communication that the whole layer hides: 1 - exposed / (dispatch + combine).

        Exposed is what the whole takes beyond the slower rank's local launch; below 0 where the phases one by one take
        less than together.
        """
        return 1 - max(0.0, self.total - self.skew * self.local) / (self.dispatch + self.combine)

    @property
    def bandwidth(self) -> float:
        """Bytes a second and direction while dispatch and combine run."""
        return self.sent / (self.dispatch + self.combine)


@dataclass(frozen=True)
class ParallelResult:
    """All rows of one run, and what they were measured on.

    Args:
        request: what was asked; ``command`` asks again.
        what: the shape stands for; ``spec``, one rank's layer in words.
        ranks: processes.
        backend: of the local layers.
        link: bytes a second and direction that plain copies reached in the same run; ``link_how`` copied.
        versions: by name.
        refused: what did not run, with the reason.
    """

    request: ParallelRequest
    what: str
    spec: str
    ranks: int
    backend: str
    link: float
    link_how: str
    versions: dict[str, str]
    rows: list[ParallelRow] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    command: str = ""

    def save(self, path: Path | str) -> None:
        """Write the file that :meth:`load` reads."""
        result_file.save(path, KIND, self)

    @classmethod
    def load(cls, path: Path | str) -> ParallelResult:
        """Read a saved result.

        Raises:
            ValueError: a file of another kind, or a damaged one, with the field at fault.
            OSError: no such file.
        """
        return result_file.load(path, KIND, cls)
