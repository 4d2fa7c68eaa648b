"""The arms: what differs between two servers, and how a server proves which arm it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foldmoe.bench.layer import OWN_ARMS
from foldmoe.bench.serve.ranks import different_plans

if TYPE_CHECKING:
    from foldmoe.bench.serve.ranks import Rank
    from foldmoe.planner.policy import Fold

FOLD = "FOLDMOE_FOLD"
STREAM = "VLLM_DISABLE_SHARED_EXPERTS_STREAM"
"""vLLM's switch: 1 runs its shared experts after the routed ones, not beside them on another stream."""

AGAIN = "-again"
"""Ends the name of an arm that is another one once more."""


class ArmError(Exception):
    """A server that does not run the arm it was started for; the message says what it runs instead."""


@dataclass(frozen=True)
class Arm:
    """One way to serve.

    Args:
        name: as on the command line.
        label: as in tables.
        fold: value of ``FOLDMOE_FOLD``.
        expected: what every rank must say that it runs.
        stream: for the engine's own layers, whether its shared experts' stream must be in use; None: not asked.
    """

    name: str
    label: str
    fold: Fold
    expected: str
    stream: bool | None = None

    @property
    def environment(self) -> dict[str, str | None]:
        """Of the server; None removes a variable that the benchmark itself was started with."""
        return {FOLD: self.fold, STREAM: "1" if self.stream is False else None}

    def refuted(self, ranks: list[Rank]) -> str:
        """Why the server does not run this arm; empty where every rank says that it does."""
        if not ranks:
            return (
                "no rank of the server wrote its state: is foldmoe installed where the server runs, and was its vLLM "
                "plugin loaded? (`foldmoe doctor` there tells)"
            )
        world = {rank.world_size for rank in ranks}
        if world != {len(ranks)}:
            return f"{len(ranks)} ranks wrote their state, they count {', '.join(map(str, sorted(world)))}"
        if differing := different_plans(ranks):
            return f"ranks run different plans: {differing}"
        for rank in ranks:
            if not rank.complete:
                return f"rank {rank.rank} has not loaded every MoE layer"
            if reason := self._refuted_by(rank):
                return f"rank {rank.rank} {reason}"
        return ""

    def _refuted_by(self, rank: Rank) -> str:
        if rank.asked != self.fold:
            return f"was asked for fold {rank.asked!r}, not {self.fold!r}: does the command line set {FOLD} itself?"
        # Layers that were refused stay with the engine: the arm is still the one asked for if others run as asked.
        if rank.runs != self.expected and not (rank.runs == "mixed" and rank.layers_by_arm.get(self.expected)):
            return f"runs {rank.runs}, not {self.expected}{rank.why()}"
        if self.stream is not None and bool(rank.stock_shared_stream) != self.stream:
            in_use = "uses" if rank.stock_shared_stream else "does not use"
            return f"{in_use} vLLM's stream for shared experts, so that it is not the {self.label} arm"
        return ""


def _own(name: str) -> Arm:
    return Arm(name, f"ours {name}", OWN_ARMS[name], expected=name)  # type: ignore[arg-type]


ARMS = {
    arm.name: arm
    for arm in (
        Arm("stock-serial", "stock serial", "stock", expected="stock", stream=False),
        Arm("stock-dual-stream", "stock dual-stream", "stock", expected="stock", stream=True),
        _own("serial"),
        _own("dual-stream"),
        _own("folded"),
        Arm("slot", "ours slot fold", "slot", expected="folded"),
    )
}
"""Every arm by name. Only ours, against one another, measure folding itself."""

DEFAULT = tuple(name for name in ARMS if name != "slot")


def parse(text: str) -> tuple[str, ...]:
    """Names of arms, comma-separated.

    Raises:
        ValueError: an unknown name, or one that is there twice.
    """
    names = tuple(part.strip() for part in text.split(","))
    if unknown := [name for name in names if name not in ARMS]:
        raise ValueError(f"no arm {', '.join(unknown)}; there are: {', '.join(ARMS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"an arm is there twice in {text}; the noise floor is what serves one twice")
    return names


def find(name: str) -> Arm:
    """An arm by its name, ``serial-again`` included.

    Raises:
        ValueError: an unknown name.
    """
    arm = ARMS.get(name.removesuffix(AGAIN))
    if arm is None:
        raise ValueError(f"no arm {name}; there are: {', '.join(ARMS)}")
    if name.endswith(AGAIN):
        return Arm(name, f"{arm.label}, again", arm.fold, arm.expected, arm.stream)
    return arm
