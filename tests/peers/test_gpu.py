"""Every peer that this machine can run, on a small layer: right in each of its arms."""

from __future__ import annotations

import pytest
import torch

from foldmoe import Format
from foldmoe.bench import shapes
from foldmoe.bench.peers import PEERS, peer_arms

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", sorted(PEERS))
def test_peer_is_right(name: str) -> None:
    device = torch.device("cuda")
    spec = shapes._spec(1024, 16, 512, Format.MXFP4, Format.FP8_128x128, 10.0)
    if reasons := PEERS[name].refusals(spec, device):
        pytest.skip("; ".join(reasons))
    generator = torch.Generator(device).manual_seed(0)
    assert spec.shared is not None
    weights = tuple(shapes.random_weights(part, spec.hidden, generator) for part in (spec.routed, spec.shared))
    arms = PEERS[name].arms
    found = peer_arms([name], arms, spec, [(weights[0], weights[1])], (1, 200))
    assert len(found.calls) == len(arms), found.refused
    for tokens in (1, 200):
        batch = shapes.random_batch(spec, tokens, generator)
        for arm in found.calls:
            assert found.error(arm, batch, spec, (weights[0], weights[1])) is not None, found.refused
