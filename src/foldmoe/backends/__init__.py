"""How a layer runs: one package a backend, registered fastest first."""

from foldmoe.backends.base import Backend, Call, PackedLayer, get
from foldmoe.backends.torch.backend import TorchBackend
from foldmoe.planner.capability import register

register(TorchBackend())

__all__ = ["Backend", "Call", "PackedLayer", "get", "register"]
