# mypy: ignore-errors
"""Token rows (:mod:`foldmoe.parallel.wire`) on GPUs: made, scattered, taken apart, summed, each in one launch.

| kernel | grid | reads | writes |
| --- | --- | --- | --- |
| pack_kernel | places of a rank | x, ids, weights | one message of rows |
| positions_kernel | ranks | ids | rows for each rank, and each token's place among them |
| scatter_kernel | tokens | x, ids, weights, places | rows by destination, and the rank's own |
| unpack_kernel | rows that arrived, own ones too | rows | what the local launch reads |
| reduce_kernel | tokens | results of all ranks | sums in the order of ranks |

The device functions without ``_kernel`` are shared with :mod:`foldmoe.parallel.one_sided_kernels`.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from foldmoe.backends.triton.kernels.numbers import e4m3_scale, narrow, widen


@triton.jit
def encode(v, scale, inverse):
    """Float32 to E4M3 bytes, nearest even, saturating; NaN stays NaN. Integer arithmetic: any GPU has it."""
    scaled = v * inverse
    magnitude = tl.abs(scaled)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    steps = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # of 2**-9, those of E4M3's subnormals
    code = tl.where(magnitude < 0.015625, steps, tl.minimum(normal, 0x7E))
    code = tl.where(scaled == scaled, code, 0x7F)
    negative = (scaled.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | negative).to(tl.uint8)


@triton.jit
def decode(byte):
    """E4M3 bytes to float32."""
    code = byte.to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


@triton.jit
def holds(ids, ends, rank):
    """Which of ``ids`` are among the ids of ``rank``; ``ends [R]`` one past each rank's last."""
    first = tl.load(ends + rank - 1, mask=rank > 0, other=0)
    return (ids >= first) & (ids < tl.load(ends + rank))


@triton.jit
def columns_of(hidden, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of a row ``[GROUPS, COLUMNS]``, and which of them there are; GROUP share a scale, 0: none do."""
    g = tl.arange(0, GROUPS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    if GROUP > 0:
        column = g * GROUP + c
        inside = (column < hidden) & (c < GROUP)
    else:
        column = g * COLUMNS + c
        inside = column < hidden
    return column, inside


@triton.jit
def load_row(
    x, ids, weights, strays, x_stride, ids_stride, weights_stride, t, live, hidden, experts,
    K: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Token ``t`` as a row's fields: ids, weights, values, scale bytes (the values again where GROUP is 0).

    Where it is not live: ids of -1, zeros. An id that is neither an expert nor -1 becomes -1 and is counted in strays.
    """
    k = tl.arange(0, KP)
    expert = tl.load(ids + t.to(tl.int64) * ids_stride + k, mask=(k < K) & live, other=-1)
    known = (expert >= 0) & (expert < experts)
    wrong = tl.sum(((expert != -1) & (known == 0)).to(tl.int32), 0)
    if wrong > 0:
        tl.atomic_add(strays, wrong.to(tl.int64), sem="relaxed")
    expert = tl.where(known, expert, -1).to(tl.int32)
    weight = tl.load(weights + t.to(tl.int64) * weights_stride + k, mask=(k < K) & live, other=0.0)
    column, inside = columns_of(hidden, GROUP, GROUPS, COLUMNS)
    value = tl.load(x + t.to(tl.int64) * x_stride + column, mask=inside & live, other=0.0)
    if GROUP > 0:
        wide = widen(value)
        finite = tl.minimum(tl.abs(wide), 3.4028234663852886e38)
        amax = tl.max(tl.where(wide == wide, finite, 0.0), 1, keep_dims=True)
        scale, inverse = e4m3_scale(amax)
        coded = encode(wide, scale, inverse)
        scale_byte = tl.reshape(scale.to(tl.int32, bitcast=True) >> 23, [GROUPS]).to(tl.uint8)
    else:
        coded = value
        scale_byte = value
    return expert, weight, coded, scale_byte


@triton.jit
def store_row(
    row, expert, weight, value, scale_byte, wanted, hidden,
    K: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The routes to ``row`` (bytes, 16-aligned); the values where they are wanted."""
    k = tl.arange(0, KP)
    tl.store(row.to(tl.pointer_type(tl.int32)) + k, expert, mask=k < K)
    tl.store((row + 4 * K).to(tl.pointer_type(tl.float32)) + k, weight, mask=k < K)
    column, inside = columns_of(hidden, GROUP, GROUPS, COLUMNS)
    tl.store((row + 8 * K).to(tl.pointer_type(value.dtype)) + column, value, mask=inside & wanted)
    if GROUP > 0:
        g = tl.arange(0, GROUPS)
        tl.store(row + 8 * K + hidden + g, scale_byte, mask=(g * GROUP < hidden) & wanted)


@triton.jit
def place_row(
    x, ids, weights, gates, gate, row, n, own, t, arrived, hidden, first, held,
    K: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    WIRE: tl.constexpr, SLOT: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """A row to line ``n`` of what the local launch reads.

    x ``[N, hidden]``; ids int32 and weights float32 ``[N, K + SLOT]``: this rank's own ids 0 .. held - 1, -1 for
    others'. Own tokens alone (``t`` of ``gate [tokens]``) get the shared slot, which follows them, or gate in gates
    ``[N]``.
    Rows that nothing here reads are zero, and so are all that have not arrived.
    """
    k = tl.arange(0, KP)
    expert = tl.load(row.to(tl.pointer_type(tl.int32)) + k, mask=k < K, other=-1) - first
    mine = (expert >= 0) & (expert < held) & (k < K) & arrived
    tl.store(ids + n * (K + SLOT) + k, tl.where(mine, expert, -1), mask=k < K)
    weight = tl.load((row + 4 * K).to(tl.pointer_type(tl.float32)) + k, mask=k < K, other=0.0)
    tl.store(weights + n * (K + SLOT) + k, weight, mask=k < K)
    share = tl.full((), 1.0, tl.float32)
    if GATED:
        share = tl.load(gate + t, mask=own, other=1.0)
    if SLOT:
        tl.store(ids + n * (K + SLOT) + K, tl.where(own, held, -1))
        tl.store(weights + n * (K + SLOT) + K, share)
    if GATED and not SLOT:
        tl.store(gates + n, share)
    used = own | (tl.max(mine.to(tl.int32), 0) > 0)
    column, inside = columns_of(hidden, GROUP, GROUPS, COLUMNS)
    if GROUP > 0:
        g = tl.arange(0, GROUPS)
        byte = tl.load(row + 8 * K + column, mask=inside & used, other=0)
        exponent = tl.load(row + 8 * K + hidden + g, mask=(g * GROUP < hidden) & used, other=0).to(tl.int32)
        value = decode(byte) * (exponent << 23).to(tl.float32, bitcast=True)[:, None]
    else:
        value = widen(tl.load((row + 8 * K).to(tl.pointer_type(WIRE)) + column, mask=inside & used, other=0.0))
    if x.dtype.element_ty == tl.bfloat16:
        value = narrow(value)
    tl.store(x + n * hidden + column, value.to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "experts"])
def pack_kernel(
    x, ids, weights, message, strays, x_stride, ids_stride, weights_stride, tokens, hidden, experts, row_bytes,
    K: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Token ``t`` to row ``t`` of ``message [places, row_bytes]``; places without a token get ids of -1."""
    t = tl.program_id(0)
    live = t < tokens
    expert, weight, value, scale_byte = load_row(
        x, ids, weights, strays, x_stride, ids_stride, weights_stride, t, live, hidden, experts,
        K, KP, GROUP, GROUPS, COLUMNS,
    )  # fmt: skip
    row = message + t.to(tl.int64) * row_bytes
    store_row(row, expert, weight, value, scale_byte, live, hidden, K, KP, GROUP, GROUPS, COLUMNS)


@triton.jit(do_not_specialize=["tokens", "me"])
def positions_kernel(
    ids, ends, places, counts, ids_stride, tokens, me,
    K: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``counts [R]``: rows to each rank, none to ``me``; ``places [tokens, R]``: each token's among them, or -1."""
    rank = tl.program_id(0)
    k = tl.arange(0, KP)[None, :]
    total = tl.zeros((), tl.int32)
    for start in range(0, tokens, BLOCK):
        t = (start + tl.arange(0, BLOCK)).to(tl.int64)
        live = t < tokens
        expert = tl.load(ids + t[:, None] * ids_stride + k, mask=live[:, None] & (k < K), other=-1)
        asked = tl.max(holds(expert, ends, rank).to(tl.int32), 1)
        asked = tl.where(rank == me, 0, asked)
        tl.store(places + t * RANKS + rank, tl.where(asked > 0, total + tl.cumsum(asked, 0) - 1, -1), mask=live)
        total += tl.sum(asked, 0)
    tl.store(counts + rank, total.to(tl.int64))


@triton.jit(do_not_specialize=["experts"])
def scatter_kernel(
    x, ids, weights, kept, sent, places, counts, strays, x_stride, ids_stride, weights_stride, hidden, experts,
    row_bytes,
    K: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Token ``t`` to row ``t`` of ``kept``, and to its place in ``sent``, which is sorted by destination."""
    t = tl.program_id(0).to(tl.int64)
    expert, weight, value, scale_byte = load_row(
        x, ids, weights, strays, x_stride, ids_stride, weights_stride, t, True, hidden, experts,
        K, KP, GROUP, GROUPS, COLUMNS,
    )  # fmt: skip
    store_row(kept + t * row_bytes, expert, weight, value, scale_byte, True, hidden, K, KP, GROUP, GROUPS, COLUMNS)
    first = tl.zeros((), tl.int64)
    for rank in tl.static_range(RANKS):
        place = tl.load(places + t * RANKS + rank)
        if place >= 0:
            row = sent + (first + place) * row_bytes
            store_row(row, expert, weight, value, scale_byte, True, hidden, K, KP, GROUP, GROUPS, COLUMNS)
        first += tl.load(counts + rank)


@triton.jit(do_not_specialize=["tokens", "own_first", "kept_rows", "first", "held"])
def unpack_kernel(
    x, ids, weights, gates, gate, kept, arrived, tokens, own_first, kept_rows, hidden, first, held, row_bytes,
    K: tl.constexpr, KP: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    WIRE: tl.constexpr, SLOT: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of ``kept``, then those of ``arrived``; the ``tokens`` from line ``own_first`` on are the rank's own.

    PDL: a local launch that waits for this kernel by itself may be scheduled while it runs.
    """
    if PDL:
        gdc_launch_dependents()
    n = tl.program_id(0).to(tl.int64)
    own = (n >= own_first) & (n < own_first + tokens)
    row = arrived + (n - kept_rows) * row_bytes
    if n < kept_rows:
        row = kept + n * row_bytes
    row = tl.multiple_of(row, 16)
    place_row(
        x, ids, weights, gates, gate, row, n, own, n - own_first, True, hidden, first, held,
        K, KP, GROUP, GROUPS, COLUMNS, WIRE, SLOT, GATED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "me"])
def reduce_kernel(
    y, own, parts, places, counts, rows, me, hidden,
    RANKS: tl.constexpr, COLUMNS: tl.constexpr, SCATTERED: tl.constexpr,
):  # fmt: skip
    """A token's results added in float32 in the order of ranks, rounded once: ``y [tokens, hidden]``.

    ``parts``: ``[R, rows, hidden]``; or (SCATTERED) what was sent by ``places`` and ``counts`` comes back in that
    order, and the rank's own results are the first lines of ``own``.
    """
    t = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < hidden
    total = tl.zeros([COLUMNS], tl.float32)
    first = tl.zeros((), tl.int64)
    for source in tl.static_range(RANKS):
        if SCATTERED:
            place = tl.load(places + t * RANKS + source).to(tl.int64)
            line = parts + (first + place) * hidden
            there = place >= 0
            if source == me:
                line = own + t * hidden
                there = True
            first += tl.load(counts + source)
        else:
            line = parts + (source * rows + t) * hidden
            there = True
        total += widen(tl.load(line + column, mask=inside & there, other=0.0))
    if y.dtype.element_ty == tl.bfloat16:
        total = narrow(total)
    tl.store(y + t * hidden + column, total.to(y.dtype.element_ty), mask=inside)
