"""Real checkpoints: families' names, safetensors headers and tensors, and an audit of what does not belong."""

from foldmoe.checkpoint.headers import Headers, read_headers
from foldmoe.checkpoint.shards import CheckpointError, TensorHeader
from foldmoe.checkpoint.specs import MoELayer, OpaqueLayer, find_layer, read_layers

__all__ = [
    "CheckpointError",
    "Headers",
    "MoELayer",
    "OpaqueLayer",
    "TensorHeader",
    "find_layer",
    "read_headers",
    "read_layers",
]
