"""Peers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foldmoe.bench.peers.humming import HummingBf16, HummingGroup, HummingToken
from foldmoe.bench.peers.torch_grouped import TorchBf16, TorchFp8
from foldmoe.bench.peers.transformers_experts import TransformersDeepGemm, TransformersGrouped

if TYPE_CHECKING:
    from foldmoe.bench.peers.base import Peer

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        HummingGroup(),
        HummingToken(),
        HummingBf16(),
        TorchFp8(),
        TorchBf16(),
        TransformersGrouped(),
        TransformersDeepGemm(),
    )
}
