"""Which tile is next: one counter for all CTAs, a ring that hands tickets to a CTA's warps, tickets to tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from foldmoe.backends.hopper import heuristics, workspace

TICKETS = gl.constexpr(4)
"""Depth of the ring of tickets."""

CUT_TILES = gl.constexpr(heuristics.CUT_TILES)

MET = gl.constexpr(workspace.MET)
HEAD = gl.constexpr(workspace.HEAD)
"""Words of the control block before the counters of cut tiles and before the tile table; see ``workspace.py``."""


# Wait until *$1 >= $2; after two seconds report to $3 and trap. The fence orders later bulk copies after the acquire.
_SPIN = gl.constexpr("""{
.reg .pred p, q;
.reg .b32 v;
.reg .b64 start, now;
ld.acquire.gpu.global.b32 v, [$1];
setp.ge.s32 p, v, $2;
@p bra DONE;
mov.u64 start, %globaltimer;
AGAIN:
nanosleep.u32 32;
ld.acquire.gpu.global.b32 v, [$1];
setp.ge.s32 p, v, $2;
@p bra DONE;
mov.u64 now, %globaltimer;
sub.s64 now, now, start;
setp.lt.s64 q, now, 2000000000;
@q bra AGAIN;
st.volatile.global.b32 [$3+4], $4;
st.volatile.global.b32 [$3+8], v;
st.volatile.global.b32 [$3+12], $2;
st.volatile.global.b32 [$3], 1;
fence.acq_rel.sys;
trap;
DONE:
fence.proxy.async.global;
mov.b32 $0, v;
}""")


@gluon.jit
def wait_for(counter, wanted, error, ticket):
    """Until others have counted so far; what they stored before is then there, for bulk copies too."""
    arguments: gl.constexpr = "=r,l,r,l,r"
    gl.inline_asm_elementwise(_SPIN, arguments, [counter, wanted, error, ticket], dtype=gl.int32, is_pure=False, pack=1)


# Under programmatic dependent launch: wait for the prologue, let the combine be scheduled. No-ops otherwise.
_AFTER_PROLOGUE = gl.constexpr("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;")


@gluon.jit
def after_prologue(run):
    """Every warp calls it before it reads what the prologue writes."""
    gl.inline_asm_elementwise(_AFTER_PROLOGUE, "=r,r", [run], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def late(value):
    """The same number, but unknown to the compiler before this point: what is made of it (addresses) is not held over a
    K loop, which has no registers for them.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def advance(slot, phase, depth: gl.constexpr):
    slot += 1
    wrap = slot == depth
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def finish_reads():
    """Waits until this thread's loads from a slot of the ring are over, not only issued: before the slot is released.

    Copies by TMA do not wait for them. Without this, where products crowded shared memory, a warp read the scales of
    a later step (39 of 2,500 calls of a layer of 32x32 scales on an H200). It stands before a step's products are
    issued or after they are waited for: in between, ptxas 12.8 crashes on it.
    """
    fence_async_shared()


@gluon.jit
def locate(ticket, head, control, capacity, C: gl.constexpr):
    """Ticket (of whole tiles) to tile: (is shared, is up, expert, row block, first token row, rows, counter).

    A row block is 256 rows; a shared down tile's is 64 x WGS beside MXFP4.
    """
    routed_tiles, shared_tiles = head
    capacity = late(capacity)  # its multiples are not made and held for all roles together
    UP: gl.constexpr = C.geometry.up4
    DOWN: gl.constexpr = C.geometry.down4
    a = shared_tiles * C.geometry.up8
    b = a + routed_tiles * UP
    c = b + shared_tiles * (C.geometry.down8 * C.passes)
    shared = (ticket < a) | ((ticket >= b) & (ticket < c))
    up = ticket < b
    expert = 0
    if shared:
        local = gl.where(up, ticket, ticket - b)
        block = local // shared_tiles
        tile = local % shared_tiles
        counter = capacity + tile
        row = gl.load(control + 2) + tile * C.shared_tokens
        rows = gl.minimum(gl.load(control + 3) - row, C.shared_tokens)
    else:
        local = gl.where(up, ticket - a, ticket - c)
        entry = local // gl.where(up, UP, DOWN)
        at = control + HEAD + entry
        first = gl.load(at + capacity)
        count = gl.load(at + 2 * capacity)
        local -= first * gl.where(up, UP, DOWN)
        block = local // count
        tile = local % count
        expert = gl.load(at)
        row = gl.load(at + 3 * capacity) + tile * C.tokens
        rows = gl.minimum(gl.load(at + 4 * capacity) - row, C.tokens)
        counter = first + tile
    return shared, up, expert, block, row, rows, counter


@gluon.jit
def up_tiles(head, C: gl.constexpr):
    routed_tiles, shared_tiles = head
    return shared_tiles * C.geometry.up8 + routed_tiles * C.geometry.up4


@gluon.jit
def ticket_count(head, parts, C: gl.constexpr):
    routed_tiles, shared_tiles = head
    g: gl.constexpr = C.geometry
    return up_tiles(head, C) * parts + shared_tiles * (g.down8 * C.passes) + routed_tiles * g.down4


@gluon.jit
def cut(head, k_up, C: gl.constexpr):
    """How up tiles are cut along K (``cut.py``): their parts, and K steps of a part but perhaps the last."""
    tiles = up_tiles(head, C)
    room = gl.minimum(gl.num_programs(0) // gl.maximum(tiles, 1), C.parts)
    parts = gl.where(tiles <= CUT_TILES, gl.maximum(room, 1), 1)
    steps = (k_up + 2 * parts - 1) // (2 * parts) * 2  # a turn of the loop over MXFP4 takes two
    return (k_up + steps - 1) // steps, steps


@gluon.jit
def part_of(ticket, head, parts, C: gl.constexpr):
    """Ticket to the number of a tile, for :func:`locate`, and the part of its K: parts of a tile follow each other."""
    ups = up_tiles(head, C)
    up = ticket < ups * parts
    return gl.where(up, ticket // parts, ticket - ups * (parts - 1)), gl.where(up, ticket % parts, 0)


@gluon.jit
def read_head(control, run):
    """Tiles of routed experts and of the shared one. Its first and last row are read where a tile of it is located:
    two registers less over every K loop.
    """
    run = late(run)
    return gl.load(control) * (run & 1), gl.load(control + 1) * (run >> 1)


@gluon.jit
def receive(tickets, slot, phase, WARPS: gl.constexpr):
    values, full, empty = tickets
    slot = late(slot)
    mbarrier.wait(full.index(slot), phase)
    ticket = gl.max(values.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)
    # Every thread arrives. Such an arrival waits for copies, of which there are none, and not for loads: so its address
    # is made of the ticket, which is -1 at least.
    async_copy.mbarrier_arrive(empty.index(gl.maximum(slot, -2 - ticket)), increment_count=False)
    slot, phase = advance(slot, phase, TICKETS)
    return ticket, slot, phase


@gluon.jit
def hand_out(tickets, slot, phase, ticket):
    values, full, empty = tickets
    mbarrier.wait(empty.index(slot), phase)
    values.index(slot).store(gl.full([1], ticket, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(full.index(slot), count=1)  # orders what all lanes stored
    async_copy.mbarrier_arrive(full.index(slot), increment_count=False)  # racecheck follows arrivals of all lanes alone
    return advance(slot, phase, TICKETS)
