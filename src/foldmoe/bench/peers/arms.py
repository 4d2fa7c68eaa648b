"""Peers to arms: one for each place that a peer's shared expert can run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from foldmoe.bench.peers.base import check, step
from foldmoe.bench.peers.registry import PEERS
from foldmoe.bench.timing import captured

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from foldmoe.bench.peers.base import Peer
    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec

    Weights = tuple[ExpertWeights, ExpertWeights]


@dataclass
class PeerArms:
    """What peers can run, and why others cannot.

    Args:
        calls: by arm, one call a set of weights.
        peers: by arm.
        refused: by peer or arm, with the reason.
    """

    calls: dict[str, list[Callable[[Batch], Tensor]]] = field(default_factory=dict)
    peers: dict[str, Peer] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def error(self, arm: str, batch: Batch, spec: LayerSpec, weights: Weights) -> float | None:
        """Relative error over the first set of weights; None, with the reason noted, if the arm must not be timed."""
        try:
            call = self.calls[arm][0]
            found = check(self.peers[arm], call(batch), batch, spec, *weights)
            if batch.x.is_cuda:
                captured(lambda _: call(batch), 1)  # what timing does; fails here or not at all
            return found
        except Exception as error:  # another library's code can raise anything, and must not end our run
            self.refused[f"{arm} at {len(batch.x)} tokens"] = _said(error)
            return None


def peer_arms(
    names: Sequence[str], arms: Sequence[str], spec: LayerSpec, sets: Sequence[Weights], tokens: Sequence[int]
) -> PeerArms:
    """Prepare peers.

    Args:
        names: of :data:`foldmoe.bench.peers.PEERS`.
        arms: of these, each peer runs those that are its own (:attr:`Peer.arms`).
        sets: routed and shared weights; each becomes a layer of its own.
        tokens: numbers of rows to compile for.

    Raises:
        ValueError: for a name that is no peer's.
    """
    found = PeerArms()
    for name in names:
        if name not in PEERS:
            raise ValueError(f"no peer {name!r}; there are: {', '.join(PEERS)}")
        peer, device = PEERS[name], sets[0][0].device
        if not set(peer.arms) & set(arms):
            found.refused[name] = f"runs as {' or '.join(peer.arms)} (--arms), asked for {', '.join(arms)}"
            continue
        if reasons := peer.refusals(spec, device):
            found.refused[name] = "; ".join(reasons)
            continue
        try:
            layers = [peer.prepare(spec, *weights, tokens) for weights in sets]
        except Exception as error:
            found.refused[name] = _said(error)
            continue
        for arm in peer.arms:
            if arm not in arms:
                continue
            if arm == "dual-stream" and device.type == "cpu":
                found.refused[f"{name} {arm}"] = "a CPU has no second stream"
                continue
            found.calls[f"{name} {arm}"] = [step(layer, arm, device) for layer in layers]
            found.peers[f"{name} {arm}"] = peer
    return found


def _said(error: Exception) -> str:
    return str(error) if isinstance(error, (ImportError, ValueError)) else f"{type(error).__name__}: {error}"
