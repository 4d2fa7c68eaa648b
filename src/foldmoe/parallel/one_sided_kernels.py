# mypy: ignore-errors
"""Token rows and results written straight into other ranks' memory, in four launches a layer.

| kernel | grid | writes | signals | waits for |
| --- | --- | --- | --- | --- |
| send_kernel | places of a rank | token rows (:mod:`foldmoe.parallel.wire`) to every rank | all ranks, last program | |
| receive_kernel | places of all ranks, own first | what the local launch reads | | the row's own source |
| return_kernel | places of other ranks | results to the rank that the token is of | all ranks, last program | |
| sum_kernel | places of a rank | sums in the order of ranks | | every other rank |

A mailbox is one allocation a rank: ``flags [R]`` int64, then two halves. Exchange e, counted on the device from 1, goes
through half e % 2; whoever has written all of it stores e into its flag on every rank. No rank starts exchange e + 2
before it has seen everybody's flag e + 1, which a rank stores after it has read exchange e: two halves are enough, and
nothing is ever reset, so that a graph can be replayed any number of times.

Order of memory: a program's stores, a barrier, an acq_rel addition to a counter, and by the last program a release at
system scope; the reader acquires at system scope. A wait that ends without its flag records the rank in ``state[2]``
and in ``alarm`` (host memory); sums are NaN from there on.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from foldmoe.backends.triton.kernels.numbers import e4m3_scale, narrow, widen

EPOCH = tl.constexpr(0)
COUNTER = tl.constexpr(1)
STALLED = tl.constexpr(2)


@triton.jit
def _mailbox(peers, rank, HEADER: tl.constexpr):
    base = tl.load(peers + rank).to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(base, 16) + HEADER


@triton.jit
def _announce(peers, state, epoch, me, programs, RANKS: tl.constexpr):
    """Called once by every program: the last one tells all ranks that exchange ``epoch`` has been written."""
    tl.debug_barrier()
    before = tl.atomic_add(state + COUNTER, 1, sem="acq_rel", scope="sys")
    if before == programs - 1:
        tl.store(state + COUNTER, 0)
        tl.store(state + EPOCH, epoch)
        for rank in tl.static_range(RANKS):
            flags = tl.load(peers + rank).to(tl.pointer_type(tl.int64))
            tl.atomic_xchg(flags + me, epoch, sem="release", scope="sys")


@triton.jit
def _wait(peers, state, alarm, epoch, source, me, limit, CLOCK: tl.constexpr):
    """Whether ``source`` has written exchange ``epoch``, after at most ``limit`` nanoseconds (polls without CLOCK)."""
    flag = tl.load(peers + me).to(tl.pointer_type(tl.int64)) + source
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    patience = tl.where(tl.load(state + STALLED, volatile=True) == 0, limit, 0)
    waited = tl.full((), 0, tl.int64)
    if CLOCK:
        start = globaltimer()
    while (seen < epoch) & (waited < patience):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        if CLOCK:
            waited = globaltimer() - start
        else:
            waited += 1
    if seen < epoch:
        tl.store(state + STALLED, source + 1)
        tl.store(alarm, source + 1)
    return seen >= epoch


@triton.jit
def _encode(v, scale, inverse):
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
def _decode(byte):
    """E4M3 bytes to float32."""
    code = byte.to(tl.int32)
    magnitude = code & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)
    value = tl.where(magnitude == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


@triton.jit
def _holds(ids, ends, rank):
    """Whether one of ``ids`` is among the ids of ``rank``; ``ends [R]`` one past each rank's last."""
    first = tl.load(ends + rank - 1, mask=rank > 0, other=0)
    return tl.max(((ids >= first) & (ids < tl.load(ends + rank))).to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["tokens", "rows", "me", "experts"])
def send_kernel(
    x, ids, weights, peers, ends, state, strays,
    x_stride, ids_stride, weights_stride, tokens, rows, me, hidden, experts, half, row_bytes,
    HEADER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Place ``t`` of this rank to all ranks: routes always, x only to a rank that holds one of its experts.

    x ``[tokens, hidden]``; ids, weights ``[tokens, K]``; GROUP columns share a scale, 0: x travels as it is. A place
    without a token sends ids of -1. An id that is neither an expert nor -1 becomes -1 and is counted in strays.
    """
    t = tl.program_id(0)
    epoch = tl.load(state + EPOCH) + 1
    live = t < tokens
    k = tl.arange(0, KP)
    expert = tl.load(ids + t.to(tl.int64) * ids_stride + k, mask=(k < K) & live, other=-1)
    known = (expert >= 0) & (expert < experts)
    wrong = tl.sum(((expert != -1) & (known == 0)).to(tl.int32), 0)
    if wrong > 0:
        tl.atomic_add(strays, wrong.to(tl.int64), sem="relaxed")
    expert = tl.where(known, expert, -1).to(tl.int32)
    weight = tl.load(weights + t.to(tl.int64) * weights_stride + k, mask=(k < K) & live, other=0.0)
    g = tl.arange(0, GROUPS)
    column = g[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = column < hidden
    if GROUP > 0:
        column = g[:, None] * GROUP + tl.arange(0, COLUMNS)[None, :]
        inside = (column < hidden) & (tl.arange(0, COLUMNS)[None, :] < GROUP)
    value = tl.load(x + t.to(tl.int64) * x_stride + column, mask=inside & live, other=0.0)
    if GROUP > 0:
        wide = widen(value)
        finite = tl.minimum(tl.abs(wide), 3.4028234663852886e38)
        amax = tl.max(tl.where(wide == wide, finite, 0.0), 1, keep_dims=True)
        scale, inverse = e4m3_scale(amax)
        value = _encode(wide, scale, inverse)
        scale_byte = tl.reshape(scale.to(tl.int32, bitcast=True) >> 23, [GROUPS]).to(tl.uint8)
    place = (me * rows + t).to(tl.int64) * row_bytes
    for rank in tl.static_range(RANKS):
        row = _mailbox(peers, rank, HEADER) + (epoch & 1) * half + place
        tl.store(row.to(tl.pointer_type(tl.int32)) + k, expert, mask=k < K)
        tl.store((row + 4 * K).to(tl.pointer_type(tl.float32)) + k, weight, mask=k < K)
        wanted = live & (_holds(expert, ends, rank) | (me == rank))
        out = (row + 8 * K).to(tl.pointer_type(value.dtype))
        tl.store(out + column, value, mask=inside & wanted)
        if GROUP > 0:
            tl.store(row + 8 * K + hidden + g, scale_byte, mask=(g * GROUP < hidden) & wanted)
    _announce(peers, state, epoch, me, rows, RANKS)


@triton.jit(do_not_specialize=["tokens", "rows", "me", "first", "held"])
def receive_kernel(
    x, ids, weights, gates, gate, peers, state, alarm,
    tokens, rows, me, hidden, first, held, half, row_bytes, limit,
    HEADER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, WIRE: tl.constexpr, SLOT: tl.constexpr, GATED: tl.constexpr,
    CLOCK: tl.constexpr,
):  # fmt: skip
    """A place of all ranks to what the local launch reads.

    x ``[R * rows, hidden]``; ids int32 and weights float32 ``[R * rows, K + SLOT]``: this rank's own ids 0 .. held - 1,
    -1 for others'. Own tokens alone get the shared slot (held - 1), or gate ``[tokens]`` in gates ``[R * rows]``. Rows
    that nothing here reads are zero.
    """
    source = (me + tl.program_id(0) // rows) % RANKS
    t = tl.program_id(0) % rows
    n = (source * rows + t).to(tl.int64)
    epoch = tl.load(state + EPOCH)
    own = source == me
    arrived = own
    if source != me:
        arrived = _wait(peers, state, alarm, epoch, source, me, limit, CLOCK)
    row = _mailbox(peers, me, HEADER) + (epoch & 1) * half + n * row_bytes
    k = tl.arange(0, KP)
    expert = tl.load(row.to(tl.pointer_type(tl.int32)) + k, mask=k < K, other=-1) - first
    mine = (expert >= 0) & (expert < held) & (k < K) & arrived
    tl.store(ids + n * (K + SLOT) + k, tl.where(mine, expert, -1), mask=k < K)
    weight = tl.load((row + 4 * K).to(tl.pointer_type(tl.float32)) + k, mask=k < K, other=0.0)
    tl.store(weights + n * (K + SLOT) + k, weight, mask=k < K)
    share = tl.full((), 1.0, tl.float32)
    if GATED:
        share = tl.load(gate + t, mask=own & (t < tokens), other=1.0)
    if SLOT:
        tl.store(ids + n * (K + SLOT) + K, tl.where(own & (t < tokens), held - 1, -1))
        tl.store(weights + n * (K + SLOT) + K, share)
    if GATED and not SLOT:
        tl.store(gates + n, share)
    used = (own & (t < tokens)) | (tl.max(mine.to(tl.int32), 0) > 0)
    g = tl.arange(0, GROUPS)
    if GROUP > 0:
        column = g[:, None] * GROUP + tl.arange(0, COLUMNS)[None, :]
        inside = (column < hidden) & (tl.arange(0, COLUMNS)[None, :] < GROUP)
        byte = tl.load(row + 8 * K + column, mask=inside & used, other=0)
        exponent = tl.load(row + 8 * K + hidden + g, mask=(g * GROUP < hidden) & used, other=0).to(tl.int32)
        value = _decode(byte) * (exponent << 23).to(tl.float32, bitcast=True)[:, None]
    else:
        column = g[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        inside = column < hidden
        value = widen(tl.load((row + 8 * K).to(tl.pointer_type(WIRE)) + column, mask=inside & used, other=0.0))
    if x.dtype.element_ty == tl.bfloat16:
        value = narrow(value)
    tl.store(x + n * hidden + column, value.to(x.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "me"])
def return_kernel(
    results, ids, peers, state, rows, me, hidden, ids_stride, half,
    HEADER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Results of other ranks' tokens back to them, where an expert of this rank was asked. Grid: (R - 1) * rows.

    results ``[R * rows, hidden]``; ids as receive_kernel wrote them.
    """
    owner = (me + 1 + tl.program_id(0) // rows) % RANKS
    t = tl.program_id(0) % rows
    n = (owner * rows + t).to(tl.int64)
    epoch = tl.load(state + EPOCH) + 1
    k = tl.arange(0, KP)
    asked = tl.max((tl.load(ids + n * ids_stride + k, mask=k < K, other=-1) >= 0).to(tl.int32), 0) > 0
    box = (_mailbox(peers, owner, HEADER) + (epoch & 1) * half).to(tl.pointer_type(results.dtype.element_ty))
    column = tl.arange(0, COLUMNS)
    value = tl.load(results + n * hidden + column, mask=(column < hidden) & asked)
    tl.store(box + (me * rows + t).to(tl.int64) * hidden + column, value, mask=(column < hidden) & asked)
    _announce(peers, state, epoch, me, (RANKS - 1) * rows, RANKS)


@triton.jit(do_not_specialize=["tokens", "rows", "me"])
def sum_kernel(
    y, results, ids, peers, ends, state, alarm, ids_stride, tokens, rows, me, hidden, half, limit,
    HEADER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    CLOCK: tl.constexpr,
):  # fmt: skip
    """A token's results added in float32 in the order of ranks, rounded once. Grid: places of a rank, empty ones too.

    y ``[tokens, hidden]``; results: this rank's own ``[R * rows, hidden]``; ids ``[tokens, K]`` over all ranks.
    """
    t = tl.program_id(0)
    epoch = tl.load(state + EPOCH)
    live = t < tokens
    k = tl.arange(0, KP)
    expert = tl.load(ids + t.to(tl.int64) * ids_stride + k, mask=(k < K) & live, other=-1)
    box = (_mailbox(peers, me, HEADER) + (epoch & 1) * half).to(tl.pointer_type(results.dtype.element_ty))
    column = tl.arange(0, COLUMNS)
    inside = (column < hidden) & live
    total = tl.zeros([COLUMNS], tl.float32)
    whole = tl.load(state + STALLED, volatile=True) == 0
    for source in tl.static_range(RANKS):
        place = (source * rows + t).to(tl.int64) * hidden + column
        if source == me:
            total += widen(tl.load(results + place, mask=inside, other=0.0))
        else:
            arrived = _wait(peers, state, alarm, epoch, source, me, limit, CLOCK)
            whole = whole & arrived
            asked = _holds(expert, ends, source) & arrived
            total += widen(tl.load(box + place, mask=inside & asked, other=0.0))
    total = tl.where(whole, total, float("nan"))
    if y.dtype.element_ty == tl.bfloat16:
        total = narrow(total)
    tl.store(y + t.to(tl.int64) * hidden + column, total.to(y.dtype.element_ty), mask=inside)
