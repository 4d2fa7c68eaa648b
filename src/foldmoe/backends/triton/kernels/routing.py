# fmt: off
"""Routes sorted by expert, in a fixed order, without the host: a stable counting sort.

Small batches are sorted by one program (:func:`sort_all`). Large ones take three launches: every program counts its own
chunk of routes (:func:`count_chunk`), counts become prefixes over chunks (:func:`scan`), and every program places its
chunk (:func:`scatter`). Both give the same order.

| buffer | shape | holds |
| --- | --- | --- |
| order | [routes] int32 | route (token * K + k) at each place of the sorted list |
| tiles | [3, capacity] int32 | expert, first place and end of its last place, a token tile |
| facts | [4] int32 | valid rows, first and last row of the shared part, token tiles |
| counts | [chunks, EP] int32 | routes of an expert in a chunk, then in all chunks before it |
| totals | [EP] int32 | routes of an expert |

EP is the number of experts rounded up to a power of two.
"""

import triton
import triton.language as tl

STEP = tl.constexpr(32)
"""Routes compared with all experts at once."""

CHUNK = tl.constexpr(256)
"""Routes of one program, where many sort."""

TILE_BLOCK = tl.constexpr(64)
"""Token tiles that are written at once."""


@triton.jit
def live_rows(tokens, valid, valid_ptr, start, end, rows_ptr):
    """Valid rows and the rows of the shared part, clamped to the batch; -1 on the host means: look on the device."""
    if valid < 0:
        valid = tl.load(valid_ptr)
    if start < 0:
        start = tl.load(rows_ptr)
        end = tl.load(rows_ptr + 1)
    valid = tl.minimum(tl.maximum(valid, 0), tokens)
    return valid, tl.maximum(start, 0), tl.minimum(end, valid)  # first >= last: no row gets it


@triton.jit
def _experts_of(ids, r, routes, experts):
    """Expert of each route, -1 for none; and how many were neither an expert nor -1."""
    raw = tl.load(ids + r, mask=r < routes, other=-1)
    found = (raw >= 0) & (raw < experts)
    strays = tl.sum(((raw != -1) & (found == 0)).to(tl.int32), 0)
    return tl.where(found, raw, -1).to(tl.int32), strays


@triton.jit
def _note_strays(strays_ptr, strays):
    if strays > 0:
        tl.atomic_add(strays_ptr, strays.to(tl.int64))


@triton.jit
def _place(order, expert, r, running, EP: tl.constexpr):
    """Put STEP routes after those placed before; returns the places that follow."""
    match = (expert[:, None] == tl.arange(0, EP)[None, :]).to(tl.int32)
    base = tl.sum(match * running[None, :], 1)
    i = tl.arange(0, STEP)
    earlier = (expert[:, None] == expert[None, :]) & (i[None, :] < i[:, None])
    tl.store(order + base + tl.sum(earlier.to(tl.int32), 1), r, mask=expert >= 0)
    return running + tl.sum(match, 0)


@triton.jit
def _write_tiles(tiles, capacity, first_tile, counts, tile_tokens, EP: tl.constexpr):
    """TILE_BLOCK entries of the tile table; returns the number of tiles in all."""
    e = tl.arange(0, EP)
    needed = (counts + tile_tokens - 1) // tile_tokens
    ends = tl.cumsum(needed, 0)
    offsets = tl.cumsum(counts, 0) - counts
    t = first_tile + tl.arange(0, TILE_BLOCK)
    expert = tl.sum((ends[None, :] <= t[:, None]).to(tl.int32), 1)
    pick = (expert[:, None] == e[None, :]).to(tl.int32)
    nth = t - tl.sum(pick * (ends - needed)[None, :], 1)
    start = tl.sum(pick * offsets[None, :], 1) + nth * tile_tokens
    end = tl.sum(pick * (offsets + counts)[None, :], 1)
    used = (t < capacity) & (expert < EP)
    tl.store(tiles + t, expert, mask=used)
    tl.store(tiles + capacity + t, start, mask=used)
    tl.store(tiles + 2 * capacity + t, tl.minimum(start + tile_tokens, end), mask=used)
    return tl.sum(needed, 0)


@triton.jit
def sort_all(ids, order, tiles, facts, strays_ptr, routes, experts, capacity, tile_tokens, EP: tl.constexpr):
    """The whole sort in one program."""
    e = tl.arange(0, EP)
    i = tl.arange(0, STEP)
    counts = tl.zeros([EP], tl.int32)
    strays = 0
    for first in range(0, routes, STEP):
        expert, wrong = _experts_of(ids, first + i, routes, experts)
        counts += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
        strays += wrong
    _note_strays(strays_ptr, strays)
    running = tl.cumsum(counts, 0) - counts
    for first in range(0, routes, STEP):
        expert, wrong = _experts_of(ids, first + i, routes, experts)
        running = _place(order, expert, first + i, running, EP)
    for first in range(0, capacity, TILE_BLOCK):
        _write_tiles(tiles, capacity, first, counts, tile_tokens, EP)
    tl.store(facts + 3, tl.sum((counts + tile_tokens - 1) // tile_tokens, 0))


@triton.jit
def count_chunk(ids, counts, strays_ptr, chunk, routes, experts, EP: tl.constexpr):
    """Routes of every expert in one chunk."""
    e = tl.arange(0, EP)
    found = tl.zeros([EP], tl.int32)
    strays = 0
    for step in range(CHUNK // STEP):
        r = chunk * CHUNK + step * STEP + tl.arange(0, STEP)
        expert, wrong = _experts_of(ids, r, routes, experts)
        found += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
        strays += wrong
    tl.store(counts + chunk * EP + e, found)
    _note_strays(strays_ptr, strays)


@triton.jit(do_not_specialize=["chunks"])
def scan(counts, totals, chunks, EP: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """Counts of each chunk to counts of all chunks before it. Grid: EP / COLUMNS."""
    e = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    running = tl.zeros([COLUMNS], tl.int32)
    for first in range(0, chunks, ROWS):
        chunk = first + tl.arange(0, ROWS)
        at = counts + chunk[:, None] * EP + e[None, :]
        found = tl.load(at, mask=chunk[:, None] < chunks, other=0)
        tl.store(at, running[None, :] + tl.cumsum(found, 0) - found, mask=chunk[:, None] < chunks)
        running += tl.sum(found, 0)
    tl.store(totals + e, running)


@triton.jit(
    do_not_specialize=["chunks", "top_k", "experts", "capacity", "tile_tokens"],
    do_not_specialize_on_alignment=["ids"],
)
def scatter(ids, counts, totals, order, tiles, facts, chunks, top_k, experts, capacity, tile_tokens, EP: tl.constexpr):
    """Place every chunk, and write the tile table. Grid: chunks, then one program per TILE_BLOCK tiles."""
    pid = tl.program_id(0)
    total = tl.load(totals + tl.arange(0, EP))
    if pid < chunks:
        offsets = tl.cumsum(total, 0) - total
        running = offsets + tl.load(counts + pid * EP + tl.arange(0, EP))
        routes = tl.load(facts) * top_k
        for step in range(CHUNK // STEP):
            r = pid * CHUNK + step * STEP + tl.arange(0, STEP)
            expert, _ = _experts_of(ids, r, routes, experts)
            running = _place(order, expert, r, running, EP)
    else:
        used = _write_tiles(tiles, capacity, (pid - chunks) * TILE_BLOCK, total, tile_tokens, EP)
        if pid == chunks:
            tl.store(facts + 3, used)
