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

With PDL (sm_90 and later) receive_kernel and sum_kernel are scheduled while the kernel before them runs, and wait for
its end; a local launch that does so too follows receive_kernel in the same way. That happens only once all programs of
the kernel before are running, so that none of them is kept from an SM by one that waits for it.

Order of memory: a program's stores, a barrier, an acq_rel addition to a counter, and by the last program a release at
system scope; the reader acquires at system scope. A wait that ends without its flag records the rank in ``state[2]``
and in ``alarm`` (host memory); sums are NaN from there on.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from foldmoe.backends.triton.kernels.numbers import narrow, widen
from foldmoe.parallel.row_kernels import holds, load_row, place_row, store_row

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
def _asked(ids, ends, rank):
    """Whether one of ``ids`` is among the ids of ``rank``."""
    return tl.max(holds(ids, ends, rank).to(tl.int32), 0) > 0


@triton.jit(do_not_specialize=["tokens", "rows", "me", "experts"])
def send_kernel(
    x, ids, weights, peers, ends, state, strays,
    x_stride, ids_stride, weights_stride, tokens, rows, me, hidden, experts, half, row_bytes,
    HEADER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Place ``t`` of this rank to all ranks: routes always, x only to a rank that holds one of its experts.

    x ``[tokens, hidden]``; ids, weights ``[tokens, K]``; see load_row.
    """
    if PDL:
        gdc_launch_dependents()
    t = tl.program_id(0)
    epoch = tl.load(state + EPOCH) + 1
    live = t < tokens
    expert, weight, value, scale_byte = load_row(
        x, ids, weights, strays, x_stride, ids_stride, weights_stride, t, live, hidden, experts,
        K, KP, GROUP, GROUPS, COLUMNS,
    )  # fmt: skip
    place = (me * rows + t).to(tl.int64) * row_bytes
    for rank in tl.static_range(RANKS):
        row = _mailbox(peers, rank, HEADER) + (epoch & 1) * half + place
        wanted = live & (_asked(expert, ends, rank) | (me == rank))
        store_row(row, expert, weight, value, scale_byte, wanted, hidden, K, KP, GROUP, GROUPS, COLUMNS)
    _announce(peers, state, epoch, me, rows, RANKS)


@triton.jit(do_not_specialize=["tokens", "rows", "me", "first", "held"])
def receive_kernel(
    x, ids, weights, gates, gate, peers, state, alarm,
    tokens, rows, me, hidden, first, held, half, row_bytes, limit,
    HEADER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, GROUP: tl.constexpr,
    GROUPS: tl.constexpr, COLUMNS: tl.constexpr, WIRE: tl.constexpr, SLOT: tl.constexpr, GATED: tl.constexpr,
    CLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A place of all ranks to what the local launch reads, see place_row; lines ``[R * rows]``."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    source = (me + tl.program_id(0) // rows) % RANKS
    t = tl.program_id(0) % rows
    n = (source * rows + t).to(tl.int64)
    epoch = tl.load(state + EPOCH)
    own = source == me
    arrived = own
    if source != me:
        arrived = _wait(peers, state, alarm, epoch, source, me, limit, CLOCK)
    row = _mailbox(peers, me, HEADER) + (epoch & 1) * half + n * row_bytes
    place_row(
        x, ids, weights, gates, gate, row, n, own & (t < tokens), t, arrived, hidden, first, held,
        K, KP, GROUP, GROUPS, COLUMNS, WIRE, SLOT, GATED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "me"])
def return_kernel(
    results, ids, peers, state, rows, me, hidden, ids_stride, half,
    HEADER: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Results of other ranks' tokens back to them, where an expert of this rank was asked. Grid: (R - 1) * rows.

    results ``[R * rows, hidden]``; ids as receive_kernel wrote them.
    """
    if PDL:
        gdc_launch_dependents()
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
    CLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token's results added in float32 in the order of ranks, rounded once. Grid: places of a rank, empty ones too.

    y ``[tokens, hidden]``; results: this rank's own ``[R * rows, hidden]``; ids ``[tokens, K]`` over all ranks.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
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
            asked = _asked(expert, ends, source) & arrived
            total += widen(tl.load(box + place, mask=inside & asked, other=0.0))
    total = tl.where(whole, total, float("nan"))
    if y.dtype.element_ty == tl.bfloat16:
        total = narrow(total)
    tl.store(y + t.to(tl.int64) * hidden + column, total.to(y.dtype.element_ty), mask=inside)
