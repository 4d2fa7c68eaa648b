"""What a launch works on: a layer's packed weights, and a call cut to size."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.backends.base import Call
    from foldmoe.backends.hopper.heuristics import Geometry
    from foldmoe.backends.hopper.pack import PackedRouted
    from foldmoe.backends.hopper.pack_bf16 import PackedBf16
    from foldmoe.backends.hopper.pack_fp8 import PackedFp8

ROUTED, SHARED, BOTH = 1, 2, 3
"""Sections of the tile list that a launch runs."""


@dataclass
class Weights:
    """One layer's packed weights and what the kernels must know of them.

    Args:
        up, down: routed experts. shared_up, shared_down: the shared expert, if there is one.
        geometry: sizes in the kernel's terms.
        strays: ``[1]`` int64 on the device, counts ids out of range.
        gpu: name of the GPU that runs them, for the table of measured tiles.
        powers: the shared expert's scales, if it has any, are powers of two.
    """

    up: PackedRouted | PackedFp8 | PackedBf16
    down: PackedRouted | PackedFp8 | PackedBf16
    shared_up: PackedFp8 | PackedBf16 | None
    shared_down: PackedFp8 | PackedBf16 | None
    geometry: Geometry
    strays: Tensor
    descriptors: dict[int, tuple[Any, ...]] = field(default_factory=dict)
    """Of the weights, by number of consumer warpgroups; kept by ``descriptors.py``."""
    gpu: str = ""
    powers: bool = False

    @property
    def experts(self) -> int:
        return self.up.shape[0]

    @property
    def device(self) -> torch.device:
        return self.strays.device

    @property
    def nbytes(self) -> int:
        parts = (self.up, self.down, self.shared_up, self.shared_down)
        return sum(p.nbytes for p in parts if p is not None)


def contiguous(call: Call) -> Call:
    """Every tensor with its rows one after the other, as the kernels read them."""
    shared = call.shared_weights
    return replace(
        call,
        x=call.x.contiguous(),
        topk_ids=call.topk_ids.contiguous(),
        topk_weights=call.topk_weights.contiguous(),
        shared_weights=None if shared is None else shared.contiguous(),
    )


def cut(call: Call, start: int, end: int) -> Call:
    """Rows start .. end as a call of their own."""
    rows = slice(start, end)
    bounds = call.shared_rows
    if isinstance(bounds, torch.Tensor):
        bounds = bounds - start
    elif bounds is not None:
        bounds = (bounds[0] - start, bounds[1] - start)
    return replace(
        call,
        x=call.x[rows],
        topk_ids=call.topk_ids[rows],
        topk_weights=call.topk_weights[rows],
        shared_weights=None if call.shared_weights is None else call.shared_weights[rows],
        num_valid_tokens=None if call.num_valid_tokens is None else call.num_valid_tokens - start,
        shared_rows=bounds,
    )


def bounds(call: Call) -> tuple[dict[str, Tensor], dict[str, int], dict[str, bool]]:
    """Row bounds as kernel arguments (tensors, numbers) and which of them the device must read."""
    rows = call.x.shape[0]
    valid: int | Tensor = rows if call.num_valid_tokens is None else call.num_valid_tokens
    shared: tuple[int, int] | Tensor = (0, rows) if call.shared_rows is None else call.shared_rows
    tensors: dict[str, Tensor] = {}
    numbers = {"shared_begin": 0, "shared_end": 0}
    if isinstance(valid, torch.Tensor):
        tensors["valid_rows"] = valid
    else:
        numbers["valid_rows"] = int(valid)
    if isinstance(shared, torch.Tensor):
        tensors["shared_rows"] = shared
    else:
        tensors["shared_rows"] = call.topk_ids  # never read
        numbers |= {"shared_begin": int(shared[0]), "shared_end": int(shared[1])}
    kinds = {
        "VALID_TENSOR": isinstance(valid, torch.Tensor),
        "SHARED_TENSOR": isinstance(shared, torch.Tensor),
    }
    return tensors, numbers, kinds
