"""The folded MoE layer as one persistent Hopper launch: up-projection, SwiGLU, quantisation, down-projection.

Weights are the 64-row M operand of ``wgmma`` and tokens its N side. A CTA takes tiles from one ticket counter, so tiles
start in list order whatever else runs on the device, and a tile only ever waits for tiles with smaller tickets:

    shared up tiles | routed up tiles | shared down tiles | routed down tiles

Where up tiles are few, their K is cut into parts with a ticket each (``cut.py``).

A routed tile is 256 packed rows x one token tile. In an up projection these are 128 gate rows and 128 up rows,
interleaved by 8: exactly one 128-column quantisation block of the hidden vector. A shared tile is the same, but beside
MXFP4 experts its down tiles are 64 x WGS rows. K is always summed in one order, whatever the tile shape, so a row's
bits do not depend on the batch it is in.

Warp roles (one CTA an SM)
    partition        warps      does
    consumer 0..WGS-1  4 each   wgmma on units of 64 rows; FP4 is upcast to E4M3 in registers; epilogue
    weights producer   1        takes tickets, hands them round, copies weight chunks (never waits for other CTAs)
    tokens producer    1        waits for the token tile's counter (down tiles), copies activations and their scales

Barriers
    name               count    filled by                         waited for by
    full[ST]           2        both producers (expect + bytes)   consumers
    empty[ST]          WGS      consumers                         both producers
    ticket_full[TD]    1+32     weights producer                  consumers, tokens producer
    ticket_empty[TD]   threads  consumers, tokens producer        weights producer
    amax_full          WGS      consumers (up tiles, not bf16)    consumers

TMA reads from multiples of 16 bytes only: the innermost coordinate of every copy is a multiple of 128 bytes, but for a
tile's scales, four bytes a row, so the prologue starts every token tile at a multiple of four rows. Columns of a tile
beyond its rows hold whatever lies there, NaN included: a product never mixes columns, and they are not stored.

A slot of the ring holds one K step of 128 (64 of bf16): weights (64 x WGS rows of E4M3, or 256 rows of E2M1 codes in
the same bytes; always 256 rows where routed experts are FP8 or bf16), their scales or exponent offsets, tokens, and one
scale a token. Nothing in a K loop waits for global memory.

Global counters: ``done[token tile]`` counts consumers that have stored their part of the hidden vector; a down tile
waits for ``up tiles x WGS``. A wait longer than two seconds writes (1, tile, found, wanted) to ``error`` (host memory)
and traps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from foldmoe.backends.hopper.kernels.copies import tokens_producer, weights_producer
from foldmoe.backends.hopper.kernels.cut import meet, place, this_part
from foldmoe.backends.hopper.kernels.epilogue import (
    finish_down,
    finish_down_tile,
    finish_up,
    finish_up_tile,
    prefetch,
    swiglu,
)
from foldmoe.backends.hopper.kernels.products import fp4_chain, fp4_product, fp8_product
from foldmoe.backends.hopper.kernels.tickets import (
    HEAD,
    TICKETS,
    after_prologue,
    cut,
    late,
    locate,
    part_of,
    read_head,
    receive,
)
from foldmoe.backends.hopper.kernels.whole import whole_tile


@gluon.jit
def _fp4_tile(
    tile, steps, rs, out, slot, phase, exchange, ring, cutting, NT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr
):
    """One tile of MXFP4 experts. One copy of the K loop serves both projections: the code must stay small (a kernel
    with one a case stalled a fifth of its time on instruction fetches).
    """
    g: gl.constexpr = C.geometry
    up, expert, block, row, rows, counter = tile
    k_up, k_down4, _k_down8 = steps
    rs1, rs2, xs = rs
    turn = exchange[0]
    k_here = k_up
    kept = 0
    if C.parts > 1:
        k_here, kept = this_part(cutting, up, k_up, rows, WG, C)
    references = gl.where(up, rs1, rs2) + (expert * gl.where(up, g.up4, g.down4) + block) * 256
    prefetch(references)
    if not g.token_scales:
        sums, slot, phase = fp4_product(gl.where(up, k_here, k_down4), slot, phase, kept, ring, NT, WG, C)
    if up:
        if g.token_scales:
            up_sums, slot, phase = fp4_chain(k_up, slot, phase, ring, NT, WG, C)
        else:
            up_sums = sums
        first, column = late(row), late(block)
        scales = (rs1 + (expert * g.up4 + column) * 256 + WG * 64, xs)
        at = (first, rows, column, counter)
        if C.parts > 1:
            acc, last = meet(up_sums[0], tile, cutting, k_up, WG, C)
            if last:
                turn = finish_up_tile((acc,), scales, out, at, exchange, g.limit4, True, False, WG, C)
        else:
            turn = finish_up_tile(up_sums, scales, out, at, exchange, g.limit4, True, g.token_scales, WG, C)
    else:
        if g.token_scales:
            sums, slot, phase = fp4_product(k_down4, slot, phase, kept, ring, NT, WG, C)
        first, column = late(row), late(block)
        scales = (rs2 + (expert * g.down4 + column) * 256 + WG * 64, xs)
        finish_down_tile(sums, scales, out, first, rows, column, True, WG, C)
    return slot, phase, turn


@gluon.jit
def _shared_tile(tile, steps, out, slot, phase, exchange, ring, first_half, cutting, WG: gl.constexpr, C: gl.constexpr):
    """One tile of the shared expert, likewise; an up tile's units one after the other, the first one's part held."""
    g: gl.constexpr = C.geometry
    WGS: gl.constexpr = C.warpgroups
    UNITS: gl.constexpr = C.units
    up, _expert, block, row, rows, counter = tile
    k_up, _k_down4, k_down8 = steps
    turn, amax, amax_full = exchange
    k_here = k_up
    kept = 0
    if C.parts > 1:
        k_here, kept = this_part(cutting, up, k_up, rows, WG, C)
    for unit in range(gl.where(up, UNITS, 1)):
        acc, slot, phase = fp8_product(gl.where(up, k_here, k_down8), slot, phase, kept, ring, WG, C)
        first, column = late(row), late(block)
        if up:
            at = (first, rows, column, counter)
            if C.parts > 1:
                acc, last = meet(acc, tile, cutting, k_up, WG, C)
                if last:
                    turn = finish_up((swiglu(acc, g.limit8),), out, at, (turn, amax, amax_full), True, WG, C)
            else:
                hidden = swiglu(acc, g.limit8)
                if UNITS == 1:
                    turn = finish_up((hidden,), out, at, (turn, amax, amax_full), True, WG, C)
                elif unit == 0:
                    first_half.index(WG).store(hidden)
                else:
                    parts = (first_half.index(WG).load(hidden.type.layout), hidden)
                    turn = finish_up(parts, out, at, (turn, amax, amax_full), True, WG, C)
        else:
            finish_down(acc, out, first, rows, (column * WGS + WG) * 64, C)
    return slot, phase, turn


@gluon.jit
def _routed_tile(tile, shared, rest, exchange, NT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """A tile of routed experts in their format; of the shared expert too where one K loop serves both."""
    g: gl.constexpr = C.geometry
    steps, rs, out, slot, phase, ring, _first_half, cutting = rest
    if g.whole:
        k_up, k_down, k_down8 = steps
        if C.one_loop:
            k_down = gl.where(shared, k_down8, k_down)
        return whole_tile(tile, (k_up, k_down), out, slot, phase, exchange, ring, g.limit4, g.routed_groups, NT, WG, C)
    else:
        return _fp4_tile(tile, steps, rs, out, slot, phase, exchange, ring, cutting, NT, WG, C)


@gluon.jit
def _routed(tile, shared, rest, exchange, WG: gl.constexpr, C: gl.constexpr):
    """The same, with narrower products where the tile has few rows."""
    rows = tile[4]
    if C.tail > 0 and rows <= C.tail:
        slot, phase, turn = _routed_tile(tile, shared, rest, exchange, C.tail, WG, C)
    elif C.between > 0 and rows <= C.between:
        slot, phase, turn = _routed_tile(tile, shared, rest, exchange, C.between, WG, C)
    else:
        slot, phase, turn = _routed_tile(tile, shared, rest, exchange, C.tokens, WG, C)
    return slot, phase, turn


@gluon.jit
def _apart(tile, rest, exchange, WG: gl.constexpr, C: gl.constexpr):
    """A tile of the shared expert, where its K loop is not the routed experts'."""
    g: gl.constexpr = C.geometry
    steps, _rs, out, slot, phase, ring, first_half, cutting = rest
    if g.whole:
        weights, offsets, tokens, _scales4, scales8, full, empty = ring
        ring8 = (weights, offsets, tokens, scales8, scales8, full, empty)
        k_up, _k_down4, k_down = steps
        return whole_tile(
            tile, (k_up, k_down), out, slot, phase, exchange, ring8, g.limit8, g.scale_groups, C.shared_tokens, WG, C
        )
    else:
        return _shared_tile(tile, steps, out, slot, phase, exchange, ring, first_half, cutting, WG, C)


@gluon.jit
def _consumer(given, WG: gl.constexpr, C: gl.constexpr):
    steps, rs, stored, control, capacity, run, ring, tickets, first_half, amax_bufs, amax_full, products, error = given
    h, hs, row_capacity, d = stored
    out = (h, hs, control + HEAD + 5 * late(capacity), row_capacity, d)
    amax4, amax8 = amax_bufs
    after_prologue(run)
    head = read_head(control, run)
    slot = 0
    phase = 0
    tslot = 0
    tphase = 0
    turn = 0
    if C.parts > 1:
        parts, most = cut(head, steps[0], C)
    ticket, tslot, tphase = receive(tickets, tslot, tphase, 4)
    while ticket >= 0:
        number = ticket
        cutting = 0
        if C.parts > 1:
            number, part = part_of(ticket, head, parts, C)
            cutting = place(number, part, parts, most, run, products, control, error, ticket)
        shared, up, expert, block, row, rows, counter = locate(number, head, control, capacity, C)
        tile = (up, expert, block, row, rows, counter)
        rest = (steps, rs, out, slot, phase, ring, first_half, cutting)
        if not C.two_loops:
            slot, phase, turn = _routed(tile, shared, rest, (turn, amax4, amax_full), WG, C)
        elif shared:
            slot, phase, turn = _apart(tile, rest, (turn, amax8, amax_full), WG, C)
        else:
            slot, phase, turn = _routed(tile, shared, rest, (turn, amax4, amax_full), WG, C)
        ticket, tslot, tphase = receive(tickets, tslot, tphase, 4)


@gluon.constexpr_function
def _by_thread(tokens):
    """32 features of a product, 16 bytes a thread: each reads what it wrote, at one address and no bank conflicts."""
    piece = [[0, 1], [0, 8]] if tokens > 8 else [[0, 1]]
    pieces = [[0, 1 << i] for i in range(4, tokens.bit_length() - 1)]
    return gl.SharedLinearLayout([*piece, [0, 2], [0, 4], [1, 0], *pieces, [2, 0], [4, 0], [8, 0], [16, 0]])


@gluon.jit(do_not_specialize=["run", "capacity", "row_capacity", "k_up", "k_down4", "k_down8"])
def folded_moe(
    codes1,
    exps1,
    codes2,
    exps2,
    shared1,
    shared2,
    scales1,
    scales2,
    x4,
    xs4,
    h4,
    hs4,
    x8,
    xs8,
    h8,
    hs8,
    rs1,
    rs2,
    xs,
    h,
    hs,
    d,
    control,
    products,
    error,
    run,
    capacity,
    row_capacity,
    k_up,
    k_down4,
    k_down8,
    C: gl.constexpr,
):
    """See the module.

    Args:
        codes1 .. scales2: descriptors of the packed weights (see ``pack.py``): up then down. Routed FP8 or bf16
            weights and their scales stand in the place of codes and offsets.
        x4 .. hs8: descriptors of quantised tokens, their scales, hidden vectors and theirs; routed then shared tiles.
        rs1, rs2: reference scale of every packed routed row. xs: the tokens' scales, ``[step, row]``.
        h, hs, d: hidden vectors, their scales ``[column block, row]``, down products float32 ``[row, H]``.
        control: the control block (``workspace.py``). products: of tiles whose K is cut (``cut.py``).
        error: four words of host memory.
        run: 1 routed tiles, 2 shared tiles, 3 both. capacity, row_capacity: strides of the tile table and the scales.
        k_up, k_down4, k_down8: the geometry's K steps as run-time numbers. With a single step known when it compiles,
            ptxas 12.8 leaves out a product's second descriptor (found with H 128 and I 64).
        C: the :class:`HopperConfig`.
    """
    NT: gl.constexpr = C.tokens
    NTS: gl.constexpr = C.shared_tokens
    WGS: gl.constexpr = C.warpgroups
    ST: gl.constexpr = C.stages
    NX: gl.constexpr = max(NT, NTS)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    KIND: gl.constexpr = gl.float8e4nv if C.geometry.quantised else gl.bfloat16
    STEP: gl.constexpr = C.geometry.step
    ROWS: gl.constexpr = 256 if C.geometry.whole else WGS * 64
    weights = gl.allocate_shared_memory(KIND, [ST, ROWS, STEP], shared1.layout)
    offsets = gl.allocate_shared_memory(gl.uint8, [ST, 4, 256], gl.NVMMASharedLayout(0, 8, 2))
    tokens = gl.allocate_shared_memory(KIND, [ST, NX, STEP], x4.layout)
    scales4 = gl.allocate_shared_memory(gl.float32, [ST, 1, max(NT, 32)], xs4.layout)
    scales8 = scales4 if C.one_loop else gl.allocate_shared_memory(gl.float32, [ST, 1, max(NTS, 32)], xs8.layout)
    amax4 = gl.allocate_shared_memory(gl.float32, [2 * WGS, NT], plain)
    amax8 = gl.allocate_shared_memory(gl.float32, [2 * WGS, NTS], plain)
    values = gl.allocate_shared_memory(gl.int32, [TICKETS, 1], plain)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    ticket_full = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], mbarrier.MBarrierLayout())
    ticket_empty = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=WGS)
    for i in gl.static_range(TICKETS):
        mbarrier.init(ticket_full.index(i), count=1 + 32)
        mbarrier.init(ticket_empty.index(i), count=128 * WGS + 32)
    # bf16 tiles agree on no scale. The compiler gives a barrier at which nobody waits to scratch, which PTX forbids:
    # a GPU that processes share writes its state back there, as bf16 a NaN (tests/hopper/reused_barrier.cu).
    amax_full = values
    if C.geometry.quantised:
        amax_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(amax_full, count=WGS)
    ring = (weights, offsets, tokens, scales4, scales8, full, empty)
    tickets = (values, ticket_full, ticket_empty)
    stored = (h, hs, row_capacity, d)
    steps = (k_up, k_down4, k_down8)
    rs = (rs1, rs2, xs)
    amax = (amax4, amax8)
    copies = (codes1, exps1, codes2, exps2, shared1, shared2, scales1, scales2)
    inputs = (x4, xs4, h4, hs4, x8, xs8, h8, hs8)
    first_half = values
    if WGS == 2 and not C.geometry.whole:
        first_half = gl.allocate_shared_memory(gl.float32, [2, 32, NTS], _by_thread(NTS))
    given = (steps, rs, stored, control, capacity, run, ring, tickets, first_half, amax, amax_full, products, error)
    if WGS == 2:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, C)),
                (_consumer, (given, 1, C)),
                (weights_producer, (copies, control, capacity, run, ring, tickets, C)),
                (tokens_producer, (inputs, control, capacity, run, error, ring, tickets, C)),
            ],
            [4, 1, 1],
            [C.registers, 32, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (given, 0, C)),
                (_consumer, (given, 1, C)),
                (_consumer, (given, 2, C)),
                (_consumer, (given, 3, C)),
                (weights_producer, (copies, control, capacity, run, ring, tickets, C)),
                (tokens_producer, (inputs, control, capacity, run, error, ring, tickets, C)),
            ],
            [4, 4, 4, 1, 1],
            [C.registers, C.registers, C.registers, 32, 32],
        )
