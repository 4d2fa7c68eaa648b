"""Peers as arms: refused with the reason, never timed while wrong, never the end of our run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe.bench import layer as bench_layer
from foldmoe.bench import shapes
from foldmoe.bench.peers import PEERS, Peer, PeerLayer, peer_arms
from foldmoe.bench.result import Request

from . import support

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.bench.shapes import Batch


class _Wrong(PeerLayer):
    def __init__(self, right: PeerLayer) -> None:
        self.right = right

    def routed(self, batch: Batch) -> Tensor:
        return 1.5 * self.right.routed(batch)

    def shared(self, batch: Batch) -> Tensor:
        if len(batch.x) == 7:
            raise RuntimeError("no kernel image is available")
        return self.right.shared(batch)


class _WrongPeer(Peer):
    name, package, tolerance = "wrong", "torch", 0.01

    def refusals(self, spec: shapes.LayerSpec, device: torch.device) -> list[str]:
        return []

    def prepare(self, spec, routed, shared, tokens):  # type: ignore[no-untyped-def]
        return _Wrong(PEERS["torch-bf16"].prepare(spec, routed, shared, tokens))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    spec, _ = support.layer()
    monkeypatch.setitem(shapes.SHAPES, "small-peers", shapes.Shape("a small layer", spec))
    monkeypatch.setitem(PEERS, "wrong", _WrongPeer())
    return "small-peers"


def test_peers_are_rows_of_the_run_and_others_are_refused(small: str) -> None:
    peers = ("humming", "torch-bf16", "wrong")
    request = Request(small, (3, 7), ("serial", "dual-stream"), "torch", 4, 2, device="cpu", peers=peers)
    result = bench_layer.run(request)
    rows = {row.arm: row for row in result.rows if row.tokens == 3}
    assert set(rows) == {"torch serial", "torch-bf16 serial"}
    assert rows["torch-bf16 serial"].against == 1.0
    assert rows["torch serial"].against == pytest.approx(
        rows["torch serial"].seconds / rows["torch-bf16 serial"].seconds
    )
    assert "needs a Hopper GPU" in result.refused["humming"]
    assert result.refused["torch-bf16 dual-stream"] == "a CPU has no second stream"
    assert "relative error" in result.refused["wrong serial at 3 tokens"]
    assert result.refused["wrong serial at 7 tokens"] == "RuntimeError: no kernel image is available"
    assert "--peers humming,torch-bf16,wrong" in request.command


def test_peers_without_an_arm_that_was_asked_for_say_so() -> None:
    spec, weights = support.layer()
    found = peer_arms(["megamoe"], ("serial", "dual-stream"), spec, [weights], (1,))
    assert found.refused == {"megamoe": "runs as folded (--arms), asked for serial, dual-stream"}


def test_unknown_peers_are_an_error() -> None:
    spec, weights = support.layer()
    with pytest.raises(ValueError, match="no peer 'hummming'"):
        peer_arms(["hummming"], ("serial",), spec, [weights], (1,))


def test_every_peer_says_what_it_is() -> None:
    spec, _ = support.layer()
    for name, peer in PEERS.items():
        assert name == peer.name
        assert peer.__doc__
        assert peer.package
        assert all(isinstance(reason, str) and reason for reason in peer.refusals(spec, torch.device("cpu")))


def test_the_documentation_lists_every_peer() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarking.md").read_text()
    for name, peer in PEERS.items():
        assert f"`{name}`" in text, name
        assert f"`{peer.package}`" in text, peer.package
