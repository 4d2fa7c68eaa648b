"""Steps of the prologue: bounds, counts, rows, the tile table, quantisation."""

import triton
import triton.language as tl

from foldmoe.backends.hopper import workspace

ROW_ALIGN = tl.constexpr(4)
"""Rows that every tile's first row is a multiple of (``workspace.ROW_ALIGN``)."""

MET = tl.constexpr(workspace.MET)
HEAD = tl.constexpr(workspace.HEAD)
"""Words of the control block before the counters of cut tiles and before the tile table; see ``workspace.py``."""


@triton.jit
def aligned(rows):
    """Rounded up to whole groups of ROW_ALIGN."""
    return (rows + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN


@triton.jit
def row_limit(value, IS_TENSOR: tl.constexpr, M):
    """A row bound, int or device tensor, clipped to 0 .. M."""
    if IS_TENSOR:
        value = tl.load(value).to(tl.int32)
    return tl.maximum(tl.minimum(value, M), 0)


@triton.jit
def load_ids(ids, at, upto, valid_routes, E):
    """Ids at flat positions ``at``, cut to -2 .. E, and which of them are routes."""
    found = tl.load(ids + at, mask=at < upto, other=-1)
    if ids.dtype.element_ty == tl.int64:  # narrowed as they are, large ones would be others' ids
        found = tl.minimum(tl.maximum(found, -2), E)
    found = found.to(tl.int32)
    return found, (found >= 0) & (found < E) & (at < valid_routes)


@triton.jit
def write_table(
    counts,
    control,
    capacity,
    base,
    shared_begin,
    shared_end,
    NT: tl.constexpr,
    NTS: tl.constexpr,
    EP: tl.constexpr,
    CUT: tl.constexpr,
    ZERO: tl.constexpr,
):
    """Header, counters to zero, and one entry a routed token tile: expert, expert's first entry, its tiles, rows.

    CUT: counters of cut tiles too.
    """
    tiles = (counts + NT - 1) // NT
    first = tl.cumsum(tiles, 0) - tiles
    taken = aligned(counts)
    begin = base + tl.cumsum(taken, 0) - taken
    routed_tiles = tl.sum(tiles, 0)
    shared_begin = tl.where(shared_end > shared_begin, shared_begin // ROW_ALIGN * ROW_ALIGN, shared_end)
    shared_tiles = (shared_end - shared_begin + NTS - 1) // NTS
    tl.store(control, routed_tiles)
    tl.store(control + 1, shared_tiles)
    tl.store(control + 2, shared_begin)
    tl.store(control + 3, shared_end)
    for i in tl.static_range(4, 8):
        tl.store(control + i, 0)
    done = control + HEAD + 5 * capacity
    lane = tl.arange(0, ZERO)
    for start in range(0, routed_tiles, ZERO):
        tl.store(done + start + lane, tl.zeros([ZERO], tl.int32), mask=start + lane < routed_tiles)
    for start in range(0, shared_tiles, ZERO):
        tl.store(done + capacity + start + lane, tl.zeros([ZERO], tl.int32), mask=start + lane < shared_tiles)
    if CUT:
        counter = tl.arange(0, 256)
        tl.store(control + MET + counter, tl.zeros([256], tl.int32), mask=counter < HEAD - MET)
    expert = tl.arange(0, EP)
    most = tl.max(tiles, 0)
    for tile in range(most):
        at = control + HEAD + first + tile
        mask = tile < tiles
        tl.store(at, expert, mask=mask)
        tl.store(at + capacity, first, mask=mask)
        tl.store(at + 2 * capacity, tiles, mask=mask)
        tl.store(at + 3 * capacity, begin, mask=mask)
        tl.store(at + 4 * capacity, begin + counts, mask=mask)
    return begin


@triton.jit
def shared_range(shared_rows, IS_TENSOR: tl.constexpr, begin, end, valid, HAS_SHARED: tl.constexpr):
    if HAS_SHARED:
        if IS_TENSOR:
            begin = tl.load(shared_rows).to(tl.int32)
            end = tl.load(shared_rows + 1).to(tl.int32)
        begin = tl.maximum(tl.minimum(begin, valid), 0)
        return begin, tl.maximum(tl.minimum(end, valid), begin)
    else:
        return valid * 0, valid * 0


@triton.jit
def stored_column(position):
    """Stored column at each position of a routed row: ``pack.column_order`` in every 128."""
    within = position // 4 % 4 * 32 + position // 32 % 4 * 8 + position // 16 % 2 * 4 + position % 4
    return position // 128 * 128 + within


@triton.jit
def quantise(x, column, H, G: tl.constexpr, WHOLE: tl.constexpr):
    """G groups of 128 columns of one token to E4M3 and power-of-two scales; amax floored at 1e-4, NaN kept.

    ``column`` may be in any order within a group. WHOLE: the groups are all of the token's and share one scale.
    """
    inside = column < H
    v = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    v = tl.reshape(v, [G, 128])
    amax = tl.max(tl.where(v == v, tl.abs(v), 0.0), 1)
    if WHOLE:
        amax = tl.max(amax, 0) + tl.zeros([G], tl.float32)
    amax = tl.maximum(amax, 1e-4)
    bits = amax.to(tl.int32, bitcast=True)
    power = (bits >> 23) - 127 - 8 + tl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    inverse = ((127 - power) << 23).to(tl.float32, bitcast=True)
    q = (v * inverse[:, None]).to(tl.float8e4nv)
    return tl.reshape(q, [G * 128]), scale


@triton.jit
def count_live(ids, begin, upto, valid_routes, E, EP: tl.constexpr, BLOCK: tl.constexpr):
    """Live routes of every expert at flat positions begin .. upto."""
    counts = tl.zeros([EP], tl.int32)
    lane = tl.arange(0, BLOCK)
    for start in range(begin, upto, BLOCK):
        found, live = load_ids(ids, start + lane, upto, valid_routes, E)
        counts += tl.histogram(tl.where(live, found, 0), EP, mask=live)
    return counts


@triton.jit
def rows_of_all(
    ids, m, mine_id, live, M, E, valid, base, K: tl.constexpr, KP: tl.constexpr, EP: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of token m's routes, from all routes."""
    before = count_live(ids, 0, m * K, valid * K, E, EP, BLOCK)
    taken = aligned(before + count_live(ids, m * K, M * K, valid * K, E, EP, BLOCK))
    free = base + tl.cumsum(taken, 0) - taken + before
    k = tl.arange(0, KP)
    twins = (mine_id[:, None] == mine_id[None, :]) & live[:, None] & (k[:, None] < k[None, :])
    return tl.gather(free, tl.where(live, mine_id, 0), 0) + tl.sum(twins.to(tl.int32), 0)


@triton.jit
def rows_in_block(
    ids, starts, mine, mine_id, live, begin, upto, E, valid, K: tl.constexpr, KP: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of one token's routes, from the first row of every expert in its block of routes and those before it."""
    before = tl.zeros([KP], tl.int32)
    lane = tl.arange(0, BLOCK)
    for start in range(begin, upto, BLOCK):
        at = start + lane
        other, other_live = load_ids(ids, at, upto, valid * K, E)
        earlier = (other[:, None] == mine_id[None, :]) & (at[:, None] < mine[None, :])
        before += tl.sum((earlier & other_live[:, None]).to(tl.int32), 0)
    return before + tl.load(starts + mine_id, mask=live, other=0)


@triton.jit
def count_strays(strays, bad):
    """Adds up ids that are neither an expert nor -1."""
    found = tl.sum(bad, 0)
    if found > 0:
        tl.atomic_add(strays, found.to(tl.int64))
