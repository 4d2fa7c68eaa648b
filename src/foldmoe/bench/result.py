"""What ``foldmoe bench layer`` was asked and found, and the file that keeps both."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from foldmoe import result_file
from foldmoe.bench.ceilings import Ceilings  # noqa: TC001  a file's fields are checked against it at run time

if TYPE_CHECKING:
    from pathlib import Path

KIND = "bench-layer"


@dataclass(frozen=True)
class Request:
    """What to time. Each field is an option of the command, under the same name.

    Args:
        shape: a key of :data:`foldmoe.bench.shapes.SHAPES`.
        tokens: numbers of rows.
        arms: of :data:`foldmoe.bench.layer.OWN_ARMS`, and "stock" for Transformers' own.
        backend: ours, or "auto".
        rounds: that count.
        inputs: sets of inputs to rotate over.
        activations: as in :class:`foldmoe.FusionPolicy`.
        device: a torch device; None: the GPU if there is one.
        peers: of :data:`foldmoe.bench.peers.PEERS`.
    """

    shape: str
    tokens: tuple[int, ...]
    arms: tuple[str, ...] = ("folded", "dual-stream", "serial", "stock")
    backend: str = "auto"
    rounds: int = 20
    inputs: int = 8
    activations: str = "checkpoint"
    device: str | None = None
    peers: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line that asks for the same; fields at their default are left out."""
        return result_file.command(("foldmoe", "bench", "layer"), self)


@dataclass(frozen=True)
class Row:
    """One arm at one number of tokens.

    Args:
        seconds: median of a call; low and high beside it.
        noise: the arm against itself.
        error: relative to the float64 oracle; None where the layer is too large to check here.
        floor: seconds that bytes and operations take at the measured ceilings.
        against: median over that of the best arm that is not ours; None without one.
    """

    arm: str
    tokens: int
    seconds: float
    low: float
    high: float
    noise: float
    error: float | None
    floor: float
    gigabytes_per_second: float
    teraflops: float
    against: float | None = None

    def bounded(self, ceilings: Ceilings) -> Row:
        """The same row with its floor by other ceilings."""
        nbytes, operations = self.gigabytes_per_second * 1e9 * self.seconds, self.teraflops * 1e12 * self.seconds
        return replace(self, floor=ceilings.floor_seconds(nbytes, operations))


@dataclass(frozen=True)
class LayerResult:
    """All rows of one run, and what they were measured on.

    Args:
        request: what was asked; :attr:`Request.command` asks again.
        shape: its key; ``what`` it stands for and ``spec``, the layer in words.
        ceilings: measured in the same run, and no lower than what a row reached.
        versions: by name.
        refused: arms that did not run, with the reason.
        command: :attr:`Request.command`, for people who read the file.
        memory: of one layer of each of our arms, after the largest batch: :meth:`foldmoe.FoldedMoE.memory`.
    """

    request: Request
    shape: str
    what: str
    spec: str
    ceilings: Ceilings
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    command: str = ""
    memory: dict[str, dict[str, int]] = field(default_factory=dict)

    def bounded(self) -> LayerResult:
        """Where a row reached more than a ceiling: by ceilings raised to it, so that no row is below its floor."""
        read = max((row.gigabytes_per_second * 1e9 for row in self.rows), default=0.0)
        ceilings = self.ceilings.at_least(read, max((row.teraflops * 1e12 for row in self.rows), default=0.0))
        if ceilings == self.ceilings:
            return self
        return replace(self, ceilings=ceilings, rows=[row.bounded(ceilings) for row in self.rows])

    def save(self, path: Path | str) -> None:
        """Write the file that :meth:`load` reads."""
        result_file.save(path, KIND, self)

    @classmethod
    def load(cls, path: Path | str) -> LayerResult:
        """Read a saved result.

        Raises:
            ValueError: a file of another kind, or a damaged one, with the field at fault.
            OSError: no such file.
        """
        return result_file.load(path, KIND, cls)
