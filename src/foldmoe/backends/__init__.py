"""How a layer runs: one package a backend, registered fastest first."""

from foldmoe.backends.base import Backend, Call, PackedLayer, Unsupported, get
from foldmoe.backends.hopper.backend import HopperBackend
from foldmoe.backends.torch.backend import TorchBackend
from foldmoe.backends.triton.backend import TritonBackend
from foldmoe.planner.capability import register

for _backend in (HopperBackend(), TritonBackend(), TorchBackend()):
    register(_backend)

__all__ = ["Backend", "Call", "PackedLayer", "Unsupported", "get", "register"]
