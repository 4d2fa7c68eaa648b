"""Other libraries' kernels as arms of ``foldmoe bench layer``: installed by name, checked before they are timed."""

from foldmoe.bench.peers.arms import PeerArms, peer_arms
from foldmoe.bench.peers.base import Peer, PeerLayer
from foldmoe.bench.peers.registry import PEERS

__all__ = ["PEERS", "Peer", "PeerArms", "PeerLayer", "peer_arms"]
