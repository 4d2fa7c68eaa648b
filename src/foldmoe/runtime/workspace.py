"""Scratch memory: one buffer per device and stream, shared by all layers, grown on demand.

Calls on one stream follow each other, so layers may share its buffer; two streams never do. During a CUDA graph capture
the buffer comes from the graph's own memory pool instead: replays then never touch memory that a later, larger batch
could have replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

ALIGNMENT = 256

_held: dict[tuple[torch.device, int], Tensor] = {}


@dataclass
class Carve:
    """A list of buffers to cut out of one allocation.

    ``add`` them all, then :meth:`take`; the memory is not initialised.
    """

    _wanted: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """One contiguous buffer, at least one element long so that it always has an address."""
        self._wanted[name] = (shape, dtype, self.nbytes)
        size = max(1, prod(shape)) * dtype.itemsize
        self.nbytes += -(-size // ALIGNMENT) * ALIGNMENT

    def take(self, device: torch.device) -> dict[str, Tensor]:
        """All buffers, in the current stream's memory."""
        memory = _memory(device, self.nbytes)
        found = {}
        for name, (shape, dtype, start) in self._wanted.items():
            size = max(1, prod(shape)) * dtype.itemsize
            flat = memory[start : start + size].view(dtype)
            found[name] = flat.view(shape) if prod(shape) else flat
        return found


def _memory(device: torch.device, nbytes: int) -> Tensor:
    if device.type != "cuda":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    held = _held.get(key)
    if held is None or held.numel() < nbytes:
        _held.pop(key, None)
        del held  # the old buffer may be reused for the new one
        held = _held[key] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return held


def held_bytes(device: torch.device) -> int:
    """Bytes held between calls on ``device``, over all streams."""
    return sum(memory.numel() for (where, _), memory in _held.items() if where == device)


def release(device: torch.device | None = None) -> None:
    """Give scratch memory back, of one device or of all; the next call takes it again."""
    for key in [key for key in _held if device is None or key[0] == device]:
        del _held[key]
