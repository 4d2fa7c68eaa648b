"""Before the launch: quantise tokens (or copy them as bf16), sort routes by (expert, token, k), list the token tiles.

Every route finds its own row without a sort: its expert's first row and the expert's live routes that come before it.
Up to ``heuristics.SMALL_ROUTES`` routes one kernel does everything (each token counts all routes); beyond, routes are
counted in blocks first (:func:`count_routes`), the blocks' prefixes and the tile table follow (:func:`list_tiles`), and
tokens count only within their block.

Rows of the sorted buffer: the shared expert's, one a token in token order (where there is a shared expert), then routes
by (expert, token, k), whose columns are in the order of ``pack.column_order`` where weights are MXFP4. Every expert
starts at a multiple of ``ROW_ALIGN`` rows, because a tile's scales, four bytes a row, are copied by TMA, which reads
from multiples of 16 bytes only. Rows in the gaps are never written: a tile may copy them, but only as columns that it
does not store. For the same reason shared tiles start at the shared range's first row rounded down: the rows before it
are computed and never read.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foldmoe.backends.hopper.kernels.routes import (
    aligned,
    count_strays,
    load_ids,
    quantise,
    row_limit,
    rows_in_block,
    rows_of_all,
    shared_range,
    stored_column,
    write_table,
)


@triton.jit
def _token(
    x,
    ids,
    xq,
    xs,
    pos,
    starts,
    m,
    part,
    M,
    E,
    valid,
    row_capacity,
    base,
    begin_route,
    upto,
    K: tl.constexpr,
    KP: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK: tl.constexpr,
    EP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    PERMUTED: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """One token's part of its columns: find its routes' rows, quantise, store to every row."""
    position = part * (G * 128) + tl.arange(0, G * 128)
    column = stored_column(position) if PERMUTED else position
    inside = position < H
    if QUANTISED:
        q, scale = quantise(x + m.to(tl.int64) * H, column, H, G, WHOLE)
    else:
        q = tl.load(x + m.to(tl.int64) * H + column, mask=inside, other=0.0).to(tl.float32).to(tl.bfloat16)
    step = part * G + tl.arange(0, G)
    if HAS_SHARED:
        tl.store(xq + m.to(tl.int64) * H + column, q, mask=inside)
        if QUANTISED:
            tl.store(xs + step.to(tl.int64) * row_capacity + m, scale, mask=step * 128 < H)
    if K > 0:
        k = tl.arange(0, KP)
        mine = m * K + k
        mine_id, live = load_ids(ids, mine, m * K + K, valid * K, E)
        live = live & (k < K)
        if HAS_STARTS:
            rows = rows_in_block(ids, starts, mine, mine_id, live, begin_route, upto, E, valid, K, KP, BLOCK)
        else:
            rows = rows_of_all(ids, m, mine_id, live, M, E, valid, base, K, KP, EP, BLOCK)
        row = tl.where(live, rows, -1)
        if part == 0:
            tl.store(pos + mine, row, mask=k < K)
        for i in tl.static_range(K):
            to = tl.sum(tl.where(k == i, row, 0), 0)
            if to >= 0:
                tl.store(xq + to.to(tl.int64) * H + position, q, mask=inside)
                if QUANTISED:
                    tl.store(xs + step.to(tl.int64) * row_capacity + to, scale, mask=step * 128 < H)


@triton.jit(do_not_specialize=["valid_rows", "shared_begin", "shared_end", "M", "E", "capacity", "row_capacity"])
def prologue(
    x,
    ids,
    xq,
    xs,
    pos,
    control,
    strays,
    valid_rows,
    shared_rows,
    shared_begin,
    shared_end,
    M,
    E,
    capacity,
    row_capacity,
    K: tl.constexpr,
    KP: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    EP: tl.constexpr,
    NT: tl.constexpr,
    NTS: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    PERMUTED: tl.constexpr,
    QUANTISED: tl.constexpr,
    VALID_TENSOR: tl.constexpr,
    SHARED_TENSOR: tl.constexpr,
    PDL: tl.constexpr,
    CUT: tl.constexpr,
):
    """Small batches: program (m, part) is a token's columns, the first program lists the tiles.

    CUT: K of up tiles may be cut (``cut.py``).
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    valid = row_limit(valid_rows, VALID_TENSOR, M)
    base = aligned(M) if HAS_SHARED else 0
    pid = tl.program_id(0)
    if pid == 0:
        begin, end = shared_range(shared_rows, SHARED_TENSOR, shared_begin, shared_end, valid, HAS_SHARED)
        counts = tl.zeros([EP], tl.int32)
        bad = tl.zeros([BLOCK], tl.int32)
        lane = tl.arange(0, BLOCK)
        for start in range(0, M * K, BLOCK):
            found, live = load_ids(ids, start + lane, M * K, valid * K, E)
            counts += tl.histogram(tl.where(live, found, 0), EP, mask=live)
            bad += ((start + lane < valid * K) & ((found < -1) | (found >= E))).to(tl.int32)
        count_strays(strays, bad)
        write_table(counts, control, capacity, base, begin, end, NT, NTS, EP, CUT, 256)
    else:
        m = (pid - 1) // PARTS
        if m < valid:
            _token(
                x,
                ids,
                xq,
                xs,
                pos,
                pos,
                m,
                (pid - 1) % PARTS,
                M,
                E,
                valid,
                row_capacity,
                base,
                0,
                M * K,
                K,
                KP,
                H,
                G,
                BLOCK,
                EP,
                HAS_SHARED,
                False,
                WHOLE,
                PERMUTED,
                QUANTISED,
            )


@triton.jit(do_not_specialize=["valid_rows", "M", "E"])
def count_routes(
    ids,
    block_counts,
    strays,
    valid_rows,
    M,
    E,
    K: tl.constexpr,
    EP: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUTES: tl.constexpr,
    VALID_TENSOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Large batches, first step: routes per expert in this block of ROUTES routes."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    valid = row_limit(valid_rows, VALID_TENSOR, M)
    counts = tl.zeros([EP], tl.int32)
    bad = tl.zeros([BLOCK], tl.int32)
    lane = tl.arange(0, BLOCK)
    origin = tl.program_id(0) * ROUTES
    upto = tl.minimum(origin + ROUTES, M * K)
    for start in range(origin, upto, BLOCK):
        at = start + lane
        found, live = load_ids(ids, at, upto, tl.minimum(valid * K, upto), E)
        counts += tl.histogram(tl.where(live, found, 0), EP, mask=live)
        bad += ((at < tl.minimum(valid * K, upto)) & ((found < -1) | (found >= E))).to(tl.int32)
    tl.store(block_counts + tl.program_id(0) * EP + tl.arange(0, EP), counts)
    count_strays(strays, bad)


@triton.jit(do_not_specialize=["valid_rows", "shared_begin", "shared_end", "M", "capacity", "blocks"])
def list_tiles(
    block_counts,
    control,
    valid_rows,
    shared_rows,
    shared_begin,
    shared_end,
    M,
    capacity,
    blocks,
    EP: tl.constexpr,
    NT: tl.constexpr,
    NTS: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    VALID_TENSOR: tl.constexpr,
    SHARED_TENSOR: tl.constexpr,
    PDL: tl.constexpr,
    CUT: tl.constexpr,
):
    """Second step, one program: the tile table; block counts become each block's first row for each expert.

    CHUNK blocks at a time, because one at a time their loads would wait for each other.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    valid = row_limit(valid_rows, VALID_TENSOR, M)
    begin, end = shared_range(shared_rows, SHARED_TENSOR, shared_begin, shared_end, valid, HAS_SHARED)
    expert = tl.arange(0, EP)[None, :]
    lane = tl.arange(0, CHUNK)[:, None]
    counts = tl.zeros([EP], tl.int32)
    for b in range(0, blocks, CHUNK):
        counts += tl.sum(tl.load(block_counts + (b + lane) * EP + expert, mask=b + lane < blocks, other=0), 0)
    base = aligned(M) if HAS_SHARED else 0
    row = write_table(counts, control, capacity, base, begin, end, NT, NTS, EP, CUT, 256)
    for b in range(0, blocks, CHUNK):
        at = block_counts + (b + lane) * EP + expert
        n = tl.load(at, mask=b + lane < blocks, other=0)
        tl.store(at, row[None, :] + tl.cumsum(n, 0) - n, mask=b + lane < blocks)
        row += tl.sum(n, 0)


@triton.jit(do_not_specialize=["valid_rows", "M", "E", "row_capacity"])
def place_tokens(
    x,
    ids,
    xq,
    xs,
    pos,
    block_counts,
    valid_rows,
    M,
    E,
    row_capacity,
    K: tl.constexpr,
    KP: tl.constexpr,
    H: tl.constexpr,
    G: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    EP: tl.constexpr,
    ROUTES: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    PERMUTED: tl.constexpr,
    QUANTISED: tl.constexpr,
    VALID_TENSOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """Third step: quantise and store, as :func:`prologue` does, counting only within the block.

    ROUTES is a multiple of K: a token's routes lie in one block.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    valid = row_limit(valid_rows, VALID_TENSOR, M)
    m = tl.program_id(0) // PARTS
    if m < valid:
        block = m * K // ROUTES
        upto = tl.minimum((block + 1) * ROUTES, M * K)
        _token(
            x,
            ids,
            xq,
            xs,
            pos,
            block_counts + block * EP,
            m,
            tl.program_id(0) % PARTS,
            M,
            E,
            valid,
            row_capacity,
            0,
            block * ROUTES,
            upto,
            K,
            KP,
            H,
            G,
            BLOCK,
            EP,
            HAS_SHARED,
            True,
            WHOLE,
            PERMUTED,
            QUANTISED,
        )
