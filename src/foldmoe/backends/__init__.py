"""How a layer runs: one package a backend, registered fastest first."""

from foldmoe.backends.base import Backend, Call, PackedLayer, get

__all__ = ["Backend", "Call", "PackedLayer", "get"]
