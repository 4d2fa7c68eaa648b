"""How a layer runs: one package a backend, registered fastest first."""

from foldmoe.backends.base import Backend, Call, PackedLayer, get
from foldmoe.backends.torch.backend import TorchBackend
from foldmoe.backends.triton.backend import TritonBackend
from foldmoe.planner.capability import register

for _backend in (TritonBackend(), TorchBackend()):
    register(_backend)

__all__ = ["Backend", "Call", "PackedLayer", "get", "register"]
