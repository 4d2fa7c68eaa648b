"""Which tile is next: one counter for all CTAs, a ring that hands tickets to a CTA's warps, tickets to tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

TICKETS = gl.constexpr(4)
"""Depth of the ring of tickets."""

HEAD = gl.constexpr(16)
"""Words before the tile table in the control block (see ``workspace.py``)."""


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
    """Ticket to tile: (is shared, is up, expert, row block, first token row, rows, counter).

    A row block is 256 rows; a shared down tile's is 64 x WGS beside MXFP4.
    """
    routed_tiles, shared_tiles, shared_begin, shared_end = head
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
        row = shared_begin + tile * C.shared_tokens
        rows = gl.minimum(shared_end - row, C.shared_tokens)
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
def ticket_count(head, C: gl.constexpr):
    routed_tiles, shared_tiles, _shared_begin, _shared_end = head
    g: gl.constexpr = C.geometry
    return shared_tiles * (g.up8 + g.down8 * C.passes) + routed_tiles * (g.up4 + g.down4)


@gluon.jit
def read_head(control, run):
    return (gl.load(control) * (run & 1), gl.load(control + 1) * (run >> 1), gl.load(control + 2), gl.load(control + 3))


@gluon.jit
def receive(tickets, slot, phase, WARPS: gl.constexpr):
    values, full, empty = tickets
    mbarrier.wait(full.index(slot), phase)
    ticket = gl.max(values.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = advance(slot, phase, TICKETS)
    return ticket, slot, phase


@gluon.jit
def hand_out(tickets, slot, phase, ticket):
    values, full, empty = tickets
    mbarrier.wait(empty.index(slot), phase)
    values.index(slot).store(gl.full([1], ticket, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(full.index(slot), count=1)
    return advance(slot, phase, TICKETS)
