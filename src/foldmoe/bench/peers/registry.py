"""Peers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foldmoe.bench.peers.deepgemm import DeepGemm
from foldmoe.bench.peers.flashinfer_cutlass import FlashInferCutlass
from foldmoe.bench.peers.humming import HummingBf16, HummingGroup, HummingToken
from foldmoe.bench.peers.marlin import Marlin
from foldmoe.bench.peers.megamoe import MegaMoE
from foldmoe.bench.peers.torch_grouped import TorchBf16, TorchFp8
from foldmoe.bench.peers.transformers_experts import TransformersDeepGemm, TransformersGrouped
from foldmoe.bench.peers.triton_kernels import TritonKernels

if TYPE_CHECKING:
    from foldmoe.bench.peers.base import Peer

PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        HummingGroup(),
        HummingToken(),
        HummingBf16(),
        Marlin(),
        TritonKernels(),
        DeepGemm(),
        MegaMoE(),
        FlashInferCutlass(),
        TorchFp8(),
        TorchBf16(),
        TransformersGrouped(),
        TransformersDeepGemm(),
    )
}
