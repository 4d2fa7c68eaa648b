"""Scratch of one call, cut from the memory that all layers on a stream share (:mod:`foldmoe.runtime.workspace`).

Nothing in it is read before the prologue writes it. The control block is int32 words:

    0  routed token tiles        4  ticket counter of a launch of routed tiles   (4 + run - 1)
    1  shared token tiles        5  ... of shared tiles
    2  first shared row, aligned 6  ... of both
    3  end of shared rows
    16 + 4 * t + g               parts of up tile t whose products warpgroup g kept, where K is cut (``cut.py``)
    HEAD + c * capacity + j      tile table, columns c: expert, its first entry, its entries, first row, end of rows
    HEAD + 5 * capacity + t      consumers that stored their part of routed token tile t's hidden vectors
    HEAD + 6 * capacity + t      the same for shared token tile t
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foldmoe.backends.hopper.heuristics import CUT_TILES
from foldmoe.runtime.workspace import Carve

if TYPE_CHECKING:
    from collections.abc import Callable

MET, PARTS_MET = 16, 4 * 2 * CUT_TILES
"""Where the counters of cut tiles are, and how many: two launches may run side by side."""

HEAD = MET + PARTS_MET

ROW_ALIGN = 4
"""Rows that every token tile starts at a multiple of: TMA copies its scales, four bytes a row, from multiples of 16."""

SMALLEST_ROUTE_BLOCK = 512
"""As ``heuristics.ROUTE_BLOCK``, which tuning only raises; whole tokens of it are more than half."""

_TILE_ROWS = 8
"""Smallest token tile."""


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass
class Buffers:
    """Tensors of one call.

    Args:
        xq, xs: quantised rows ``[rows, H]`` and scales ``[H / 128, row_capacity]``; bf16 rows have none.
        h, hs: hidden vectors and their scales, likewise.
        d: down products ``[rows, H]`` float32.
        pos: row of every route, -1 for none.
        control: see the module. capacity: entries of the tile table.
        block_counts: routes per block and expert (large batches).
        products: of up tiles whose K is cut (``cut.py``): ``[2 * CUT_TILES, steps, 2048]`` float32.
        described: TMA descriptors of these buffers, by what they depend on beside them; kept by ``descriptors.py``.
    """

    xq: Tensor
    xs: Tensor
    h: Tensor
    hs: Tensor
    d: Tensor
    pos: Tensor
    control: Tensor
    block_counts: Tensor
    products: Tensor
    capacity: int
    row_capacity: int
    described: dict[tuple[int, ...], tuple[Any, ...]] = field(default_factory=dict)


def sorted_rows(tokens: int, top_k: int, experts: int, shared: bool) -> int:
    """Most rows that a batch's sorted buffer takes: every expert that it touches starts at a multiple of ROW_ALIGN."""
    routes = tokens * top_k
    return (_up(tokens, ROW_ALIGN) if shared else 0) + routes + (ROW_ALIGN - 1) * min(experts, routes)


class Sizes(NamedTuple):
    """What a batch's buffers depend on.

    Args:
        tokens, top_k, experts: of the batch. shared: whether there is a shared expert.
        hidden, h_stride: columns of tokens and of hidden vectors. dtype: of both.
        cut_steps: K steps of up tiles where they may be cut, else 0.
    """

    tokens: int
    top_k: int
    experts: int
    shared: bool
    hidden: int
    h_stride: int
    dtype: torch.dtype = torch.float8_e4m3fn
    cut_steps: int = 0


def allocate(sizes: Sizes, device: torch.device | str) -> Buffers:
    """Buffers for a batch, not initialised."""
    carve, make = _layout(sizes)
    return carve.kept(torch.device(device), make)


@lru_cache(maxsize=1024)
def _layout(sizes: Sizes) -> tuple[Carve, Callable[[dict[str, Tensor]], Buffers]]:
    tokens, top_k, experts, shared, hidden, h_stride, dtype, cut_steps = sizes
    rows, routes = sorted_rows(tokens, top_k, experts, shared), tokens * top_k
    rows = _up(max(rows, 128), 128)
    capacity = min(routes, experts + routes // _TILE_ROWS) + 1
    counters = capacity + _up(tokens, _TILE_ROWS) // _TILE_ROWS + 2
    blocks = routes // (SMALLEST_ROUTE_BLOCK // 2) + 2
    bins = max(16, 1 << max(experts - 1, 0).bit_length())
    carve = Carve()
    carve.add("xq", (rows, hidden), dtype)
    carve.add("xs", (hidden // 128, rows), torch.float32)
    carve.add("h", (rows, h_stride), dtype)
    carve.add("hs", (h_stride // 128, rows), torch.float32)
    carve.add("d", (rows, hidden), torch.float32)
    carve.add("pos", (max(routes, 1),), torch.int32)
    carve.add("control", (HEAD + 5 * capacity + counters,), torch.int32)
    carve.add("block_counts", (blocks * bins,), torch.int32)
    carve.add("products", (2 * CUT_TILES * cut_steps, 2048), torch.float32)
    return carve, lambda tensors: Buffers(**tensors, capacity=capacity, row_capacity=rows)


@cache
def stall_report(device: torch.device) -> Tensor:
    """Four words of host memory that a launch writes before it gives up: 1, ticket, found, wanted."""
    return torch.zeros(4, dtype=torch.int32, pin_memory=device.type == "cuda")
