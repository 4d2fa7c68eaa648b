# fmt: off
"""The first launch of a layer: routes are sorted (or counted), x is rounded and laid out for the GEMMs.

Programs 0 .. route_programs - 1 deal with routes, the others with one row x COLUMNS columns of x each.
"""

import triton
import triton.language as tl

from foldmoe.backends.triton.kernels.numbers import amax_of, narrow, position, quantize, widen
from foldmoe.backends.triton.kernels.routing import count_chunk, live_rows, sort_all

COLUMNS = tl.constexpr(1024)
"""Columns of one program, in groups of 128."""

WHOLE, GROUPS, TOKEN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""Rounding of activations: to bf16 only, to E4M3 per token per 128 columns, to E4M3 per token."""


@triton.jit
def _token_amax(x, columns):
    amax = tl.zeros([1, 1], tl.float32)
    for first in range(0, columns, COLUMNS):
        k = first + tl.arange(0, COLUMNS)[None, :]
        found = amax_of(widen(tl.load(x + k, mask=k < columns, other=0.0)), 1)
        amax = tl.where((amax != amax) | (found <= amax), amax, found)  # NaN stays
    return amax


@triton.jit
def round_block(
    x, block, columns, first_out, second_out, ROUND: tl.constexpr, FIRST: tl.constexpr, FIRST_BK: tl.constexpr,
    SECOND: tl.constexpr, SECOND_BK: tl.constexpr,
):
    """COLUMNS columns of one row, written as bf16 in the column order of one or two users (0 planes: no such user)."""
    k = block * COLUMNS + tl.arange(0, COLUMNS // 128)[:, None] * 128 + tl.arange(0, 128)[None, :]
    v = widen(tl.load(x + k, mask=k < columns, other=0.0))
    if ROUND == GROUPS:
        v = quantize(v, amax_of(v, 1))
    if ROUND == TOKEN:
        v = quantize(v, _token_amax(x, columns))
    if FIRST:
        tl.store(first_out + position(k, FIRST, FIRST_BK), narrow(v), mask=k < columns)
    if SECOND:
        tl.store(second_out + position(k, SECOND, SECOND_BK), narrow(v), mask=k < columns)


@triton.jit(
    do_not_specialize=[
        "tokens", "top_k", "experts", "capacity", "tile_tokens", "route_programs", "valid", "start", "end",
    ],
    do_not_specialize_on_alignment=["ids", "valid_ptr", "rows_ptr"],
)
def prepare(
    x, ids, valid_ptr, rows_ptr, order, tiles, facts, counts, strays, first_out, second_out, tokens, hidden,
    out_stride, top_k, experts, capacity, tile_tokens, route_programs, valid, start, end, EP: tl.constexpr,
    ONE_PROGRAM: tl.constexpr, ROUND: tl.constexpr, FIRST: tl.constexpr, FIRST_BK: tl.constexpr,
    SECOND: tl.constexpr, SECOND_BK: tl.constexpr,
):
    """Grid: route_programs (at least 1) + tokens * ceil(hidden / COLUMNS) (0 where x is used as it is)."""
    pid = tl.program_id(0)
    valid, start, end = live_rows(tokens, valid, valid_ptr, start, end, rows_ptr)
    if pid < route_programs:
        if pid == 0:
            tl.store(facts, valid)
            tl.store(facts + 1, start)
            tl.store(facts + 2, end)
        if EP:
            if ONE_PROGRAM:
                sort_all(ids, order, tiles, facts, strays, valid * top_k, experts, capacity, tile_tokens, EP)
            else:
                count_chunk(ids, counts, strays, pid, valid * top_k, experts, EP)
    else:
        blocks = tl.cdiv(hidden, COLUMNS)
        row = ((pid - route_programs) // blocks).to(tl.int64)
        if row < valid:
            round_block(
                x + row * hidden, (pid - route_programs) % blocks, hidden, first_out + row * out_stride,
                second_out + row * out_stride, ROUND, FIRST, FIRST_BK, SECOND, SECOND_BK,
            )
