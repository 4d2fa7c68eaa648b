"""Scratch memory: one buffer per device and stream, shared by all layers, grown on demand.

Calls on one stream follow each other, so layers may share its buffer; two streams never do. One thread at a time may
call layers on a stream: launches of two, mixed, would write over each other's buffers. During a CUDA graph capture the
buffer comes from the graph's own memory pool instead: replays then never touch memory that a later, larger batch could
have replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from foldmoe.runtime.devices import capturing

if TYPE_CHECKING:
    from collections.abc import Callable

ALIGNMENT = 256

SHORT = 2**31 - 1
"""Bytes of storage up to which Triton's AMD backend takes 32-bit offsets: kernels of their own."""

MOST_KEPT = 64
"""Of one buffer, how many cuts are kept: an engine's batches have any size."""

_T = TypeVar("_T")


@dataclass
class _Held:
    """One buffer, and what was made of it for as long as it is held."""

    memory: Tensor
    made: dict[Carve, object] = field(default_factory=dict)


_held: dict[tuple[torch.device, int, bool], _Held] = {}


@dataclass(eq=False)
class Carve:
    """A list of buffers to cut out of one allocation.

    ``add`` them all, then :meth:`take` or :meth:`kept`; the memory is not initialised.
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
        return self._cut(_hold(device, self.nbytes).memory)

    def kept(self, device: torch.device, make: Callable[[dict[str, Tensor]], _T]) -> _T:
        """What ``make`` makes of all buffers; the same object as long as they are the same memory.

        Cutting takes tens of microseconds of the host's time, more than a small launch. For a ``Carve`` that is itself
        kept; ``make`` must always be the same.
        """
        held = _hold(device, self.nbytes)
        if self not in held.made:
            if len(held.made) >= MOST_KEPT:
                held.made.clear()
            held.made[self] = make(self._cut(held.memory))
        return held.made[self]  # type: ignore[return-value]

    def _cut(self, memory: Tensor) -> dict[str, Tensor]:
        found = {}
        for name, (shape, dtype, start) in self._wanted.items():
            size = max(1, prod(shape)) * dtype.itemsize
            flat = memory[start : start + size].view(dtype)
            found[name] = flat.view(shape) if prod(shape) else flat
        return found


def _hold(device: torch.device, nbytes: int) -> _Held:
    if device.type != "cuda" or capturing(device):
        return _Held(torch.empty(nbytes, dtype=torch.uint8, device=device))
    # On ROCm a long buffer is never a small call's: that would take other kernels than it did before, and in a graph.
    long = nbytes > SHORT and torch.version.hip is not None
    key = (device, torch.cuda.current_stream(device).cuda_stream, long)
    held = _held.get(key)
    if held is None or held.memory.numel() < nbytes:
        _held.pop(key, None)
        del held  # the old buffer may be reused for the new one
        held = _held[key] = _Held(torch.empty(nbytes, dtype=torch.uint8, device=device))
    return held


def held_bytes(device: torch.device) -> int:
    """Bytes held between calls on ``device``, over all streams."""
    return sum(held.memory.numel() for (where, *_), held in _held.items() if where == device)


def release(device: torch.device | None = None) -> None:
    """Give scratch memory back, of one device or of all; the next call takes it again."""
    for key in [key for key in _held if device is None or key[0] == device]:
        del _held[key]
