"""The folded MoE layer as one persistent Hopper launch: up-projection, SwiGLU, quantisation, down-projection.

Weights are the 64-row M operand of ``wgmma`` and tokens its N side. A CTA takes tiles from one ticket counter, so tiles
start in list order whatever else runs on the device, and a tile only ever waits for tiles with smaller tickets:

    shared up tiles | routed up tiles | shared down tiles | routed down tiles

An up tile is 256 packed rows (128 gate rows, 128 up rows, interleaved by 8) x one token tile: exactly one 128-column
quantisation block of the hidden vector. A down tile is 64 x WGS rows. K is always summed in one order, whatever the
tile shape, so a row's bits do not depend on the batch it is in.

Warp roles (one CTA an SM)
    partition        warps      does
    consumer 0..WGS-1  4 each   wgmma on its own 64 rows; FP4 is upcast to E4M3 in registers; epilogue
    weights producer   1        takes tickets, hands them round, copies weight chunks (never waits for other CTAs)
    tokens producer    1        waits for the token tile's counter (down tiles), copies activations and their scales

Barriers
    name               count    filled by                         waited for by
    full[ST]           2        both producers (expect + bytes)   consumers
    empty[ST]          WGS      consumers                         both producers
    ticket_full[TD]    1        weights producer                  consumers, tokens producer
    ticket_empty[TD]   WGS+1    consumers, tokens producer        weights producer
    amax_full          WGS      consumers (up tiles)              consumers

TMA reads from multiples of 16 bytes only: the innermost coordinate of every copy is a multiple of 128 bytes, but for a
tile's scales, four bytes a row, so the prologue starts every token tile at a multiple of four rows. Columns of a tile
beyond its rows hold whatever lies there, NaN included: a product never mixes columns, and they are not stored.

A slot of the ring holds one K step of 128: weights (E4M3 rows, or E2M1 codes in the first half of the same bytes and
their exponent offsets), tokens, and one scale a token.

Global counters: ``done[token tile]`` counts consumers that have stored their part of the hidden vector; a down tile
waits for ``up tiles x WGS``. A wait longer than two seconds writes (1, tile, found, wanted) to ``error`` (host memory)
and traps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

# Names that changed between Triton 3.6 and 3.9.
_barrier = getattr(gl, "thread_barrier", None) or gl.barrier
_tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_OLD_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))

TICKETS = gl.constexpr(4)
"""Depth of the ring of tickets."""

HEAD = gl.constexpr(16)
"""Words before the tile table in the control block (see ``workspace.py``)."""

# Eight E2M1 codes (one word) to two words of four E4M3; $3 and $7 hold the table of the eight magnitudes at this
# exponent.
_UPCAST = gl.constexpr("""{
.reg .b32 m, t, u, v;
and.b32 m, $2, 0x77777777;
prmt.b32 t, $3, $7, m;
shr.b32 m, m, 16;
prmt.b32 u, $3, $7, m;
shl.b32 v, $2, 4;
lop3.b32 t, t, $2, 0x80808080, 0xf8;
lop3.b32 u, u, v, 0x80808080, 0xf8;
mov.b32 $0, t;
mov.b32 $1, u;
}""")

# x * sigmoid(x) from approximate exp2 and reciprocal: within 1e-6 of the exact value in five instructions, not twenty.
_SILU = gl.constexpr("""{
.reg .f32 e;
mul.f32 e, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 e, e;
add.f32 e, e, 0f3F800000;
rcp.approx.ftz.f32 e, e;
mul.f32 $0, $1, e;
}""")

# Under programmatic dependent launch: wait for the prologue, let the combine be scheduled. No-ops otherwise.
_AFTER_PROLOGUE = gl.constexpr("griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1;")

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
def _advance(slot, phase, depth: gl.constexpr):
    slot += 1
    wrap = slot == depth
    return gl.where(wrap, 0, slot), gl.where(wrap, phase ^ 1, phase)


@gluon.jit
def _fp4_view(weights, slot, WGS: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout(0, 8, 2)
    if _OLD_REINTERPRET:
        return weights.index(slot)._reinterpret(gl.uint8, [WGS * 32, 256], layout).slice(0, WGS * 16)
    else:
        return weights.index(slot).reinterpret(gl.uint8, [WGS * 32, 256], layout).slice(0, WGS * 16)


@gluon.jit
def _locate(ticket, head, control, capacity, C: gl.constexpr):
    """Ticket to tile: (is shared, is up, expert, row block of 64 x WGS or 256 rows, first token row, rows, counter)."""
    routed_tiles, shared_tiles, shared_begin, shared_end = head
    UP: gl.constexpr = C.geometry.up4
    DOWN: gl.constexpr = C.geometry.down4 * C.halves
    a = shared_tiles * C.geometry.up8
    b = a + routed_tiles * UP
    c = b + shared_tiles * (C.geometry.down8 * C.halves)
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
def _total(head, C: gl.constexpr):
    routed_tiles, shared_tiles, _shared_begin, _shared_end = head
    g: gl.constexpr = C.geometry
    return shared_tiles * (g.up8 + g.down8 * C.halves) + routed_tiles * (g.up4 + g.down4 * C.halves)


@gluon.jit
def _read_head(control, run):
    return (gl.load(control) * (run & 1), gl.load(control + 1) * (run >> 1), gl.load(control + 2), gl.load(control + 3))


@gluon.jit
def _receive(tickets, slot, phase, WARPS: gl.constexpr):
    values, full, empty = tickets
    mbarrier.wait(full.index(slot), phase)
    ticket = gl.max(values.index(slot).load(gl.BlockedLayout([1], [32], [WARPS], [0])), axis=0)
    mbarrier.arrive(empty.index(slot), count=1)
    slot, phase = _advance(slot, phase, TICKETS)
    return ticket, slot, phase


@gluon.jit
def _hand_out(tickets, slot, phase, ticket):
    values, full, empty = tickets
    mbarrier.wait(empty.index(slot), phase)
    values.index(slot).store(gl.full([1], ticket, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(full.index(slot), count=1)
    return _advance(slot, phase, TICKETS)


@gluon.jit
def _copy_fp4(
    codes, exponents, unit, steps, slot, phase, weights, offsets, full, empty, WGS: gl.constexpr, ST: gl.constexpr
):
    for _ in range(steps):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, WGS * 4352)
        _tma_load(codes, [unit * 16, 0], bar, _fp4_view(weights, slot, WGS))
        _tma_load(exponents, [unit, 0], bar, offsets.index(slot))
        unit += 4
        slot, phase = _advance(slot, phase, ST)
    return slot, phase


@gluon.jit
def _copy_fp8(values, unit, steps, slot, phase, weights, full, empty, WGS: gl.constexpr, ST: gl.constexpr):
    for _ in range(steps):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, WGS * 8192)
        _tma_load(values, [unit * 64, 0], bar, weights.index(slot))
        unit += 4
        slot, phase = _advance(slot, phase, ST)
    return slot, phase


@gluon.jit
def _weights_producer(desc, control, capacity, run, ring, tickets, C: gl.constexpr):
    g: gl.constexpr = C.geometry
    WGS: gl.constexpr = C.warpgroups
    HALVES: gl.constexpr = C.halves
    ST: gl.constexpr = C.stages
    codes1, exps1, codes2, exps2, shared1, shared2 = desc
    weights, offsets, _tokens, _scales4, _scales8, full, empty = ring
    head = _read_head(control, run)
    total = _total(head, C)
    slot = 0
    phase = 1
    tslot = 0
    tphase = 1
    ticket = gl.atomic_add(control + 3 + run, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        tslot, tphase = _hand_out(tickets, tslot, tphase, ticket)
        shared, up, expert, block, _row, _rows, _counter = _locate(ticket, head, control, capacity, C)
        if shared:
            if g.up8 > 0:
                if up:
                    for half in range(HALVES):
                        slot, phase = _copy_fp8(
                            shared1, block * g.k_up * 4 + half * WGS, g.k_up, slot, phase, weights, full, empty, WGS, ST
                        )
                else:
                    unit = block // HALVES * g.k_down8 * 4 + block % HALVES * WGS
                    slot, phase = _copy_fp8(shared2, unit, g.k_down8, slot, phase, weights, full, empty, WGS, ST)
        else:
            if up:
                for half in range(HALVES):
                    unit = (expert * g.up4 + block) * g.k_up * 4 + half * WGS
                    slot, phase = _copy_fp4(
                        codes1, exps1, unit, (g.k_up + 1) // 2 * 2, slot, phase, weights, offsets, full, empty, WGS, ST
                    )
            else:
                unit = (expert * g.down4 + block // HALVES) * g.k_down4 * 4 + block % HALVES * WGS
                slot, phase = _copy_fp4(
                    codes2, exps2, unit, (g.k_down4 + 1) // 2 * 2, slot, phase, weights, offsets, full, empty, WGS, ST
                )
        ticket = gl.atomic_add(control + 3 + run, 1, sem="relaxed", scope="gpu")
    _hand_out(tickets, tslot, tphase, -1)


@gluon.jit
def _copy_tokens(x, xs, row, steps, slot, phase, tokens, scales, full, empty, NT: gl.constexpr, ST: gl.constexpr):
    for kb in range(steps):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, NT * 128 + max(NT, 32) * 4)
        _tma_load(x, [row, kb * 128], bar, tokens.index(slot).slice(0, NT))
        _tma_load(xs, [kb, row], bar, scales.index(slot))
        slot, phase = _advance(slot, phase, ST)
    return slot, phase


@gluon.jit
def _tokens_producer(desc, control, capacity, run, error, ring, tickets, C: gl.constexpr):
    g: gl.constexpr = C.geometry
    NT: gl.constexpr = C.tokens
    NTS: gl.constexpr = C.shared_tokens
    WGS: gl.constexpr = C.warpgroups
    HALVES: gl.constexpr = C.halves
    ST: gl.constexpr = C.stages
    x4, xs4, h4, hs4, x8, xs8, h8, hs8 = desc
    _weights, _offsets, tokens, scales4, scales8, full, empty = ring
    head = _read_head(control, run)
    slot = 0
    phase = 1
    tslot = 0
    tphase = 0
    ticket, tslot, tphase = _receive(tickets, tslot, tphase, 1)
    while ticket >= 0:
        shared, up, _expert, _block, row, _rows, counter = _locate(ticket, head, control, capacity, C)
        if not up:
            wanted = gl.where(shared, g.up8, g.up4) * WGS
            gl.inline_asm_elementwise(
                _SPIN,
                "=r,l,r,l,r",
                [control + HEAD + 5 * capacity + counter, wanted, error, ticket],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
        if shared:
            if g.up8 > 0:
                if up:
                    for _half in range(HALVES):
                        slot, phase = _copy_tokens(
                            x8, xs8, row, g.k_up, slot, phase, tokens, scales8, full, empty, NTS, ST
                        )
                else:
                    slot, phase = _copy_tokens(
                        h8, hs8, row, g.k_down8, slot, phase, tokens, scales8, full, empty, NTS, ST
                    )
        else:
            if up:
                for _half in range(HALVES):
                    slot, phase = _copy_tokens(
                        x4, xs4, row, (g.k_up + 1) // 2 * 2, slot, phase, tokens, scales4, full, empty, NT, ST
                    )
            else:
                slot, phase = _copy_tokens(
                    h4, hs4, row, (g.k_down4 + 1) // 2 * 2, slot, phase, tokens, scales4, full, empty, NT, ST
                )
        ticket, tslot, tphase = _receive(tickets, tslot, tphase, 1)


@gluon.jit
def _upcast(codes, offsets, dot_layout: gl.constexpr):
    """A warpgroup's 64 x 128 E2M1 codes to the A operand in E4M3: exact, relative to the row's reference exponent."""
    QL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [0, 64], [0, 128], [1, 0]],
        [[2, 0], [4, 0]],
        [],
        [16, 256],
    )
    SL: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1]], [[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]], [[0, 64], [0, 128]], [], [1, 256]
    )
    q = codes.load(QL).reshape([2, 4, 8, 4, 2, 2, 4])  # v w g t s h i
    q = q.permute((1, 5, 2, 0, 4, 3, 6)).reshape([64, 4, 4, 4])  # (w h g) (v s) t i
    s = offsets.load(SL).reshape([4, 8, 4, 2]).permute((0, 3, 1, 2)).reshape([64, 4])  # (w h g) t
    s = gl.convert_layout(s, gl.SliceLayout(1, gl.SliceLayout(3, q.type.layout)), assert_trivial=True).to(gl.int32)
    low = (s * 0x08080800 + 0x14100800).expand_dims(1).expand_dims(3)
    high = (s * 0x08080808 + 0x24201C18).expand_dims(1).expand_dims(3)
    a, b = gl.inline_asm_elementwise(
        _UPCAST, "=r,=r,r,r,r,r,r,r,r,r,r", [q, low, high], dtype=(gl.uint8, gl.uint8), is_pure=True, pack=4
    )
    ab = (
        gl.join(a.reshape([64, 4, 16]), b.reshape([64, 4, 16]))
        .permute((0, 1, 3, 2))
        .reshape([64, 128])
        .to(gl.float8e4nv, bitcast=True)
    )
    return gl.convert_layout(ab, dot_layout, assert_trivial=True)


@gluon.jit
def _fp4_product(steps, slot, phase, ring, NT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Sum over K of codes x tokens, promoted to float32 times the token's scale every 128 columns.

    Two steps a turn (an FP8 operand carried round the loop costs byte shuffles); an odd K has a last step of zeros.
    """
    weights, offsets, tokens, scales4, _scales8, full, empty = ring
    WGS: gl.constexpr = C.warpgroups
    ST: gl.constexpr = C.stages
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, NT, 32])
    dot_layout: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=mma, k_width=4)
    zero = gl.zeros([64, NT], gl.float32, mma)
    acc = gl.zeros([64, NT], gl.float32, mma)
    for _ in range((steps + 1) // 2):
        slot1, phase1 = _advance(slot, phase, ST)
        mbarrier.wait(full.index(slot), phase)
        a0 = _upcast(_fp4_view(weights, slot, WGS).slice(WG * 16, 16), offsets.index(slot).slice(WG, 1), dot_layout)
        p0 = warpgroup_mma(a0, tokens.index(slot).slice(0, NT).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(full.index(slot1), phase1)
        a1 = _upcast(_fp4_view(weights, slot1, WGS).slice(WG * 16, 16), offsets.index(slot1).slice(WG, 1), dot_layout)
        if C.deep:
            p1 = warpgroup_mma(a1, tokens.index(slot1).slice(0, NT).permute((1, 0)), zero, use_acc=False, is_async=True)
            s0 = scales4.index(slot).slice(0, NT, 1).load(mma)
            part = warpgroup_mma_wait(1, deps=(p0,))
            mbarrier.arrive(empty.index(slot), count=1)
            acc += part * s0
            s1 = scales4.index(slot1).slice(0, NT, 1).load(mma)
            part1 = warpgroup_mma_wait(0, deps=(p1,))
            mbarrier.arrive(empty.index(slot1), count=1)
            acc += part1 * s1
        else:
            s0 = scales4.index(slot).slice(0, NT, 1).load(mma)
            part = warpgroup_mma_wait(0, deps=(p0,))
            mbarrier.arrive(empty.index(slot), count=1)
            acc += part * s0
            p1 = warpgroup_mma(a1, tokens.index(slot1).slice(0, NT).permute((1, 0)), zero, use_acc=False, is_async=True)
            s1 = scales4.index(slot1).slice(0, NT, 1).load(mma)
            part1 = warpgroup_mma_wait(0, deps=(p1,))
            mbarrier.arrive(empty.index(slot1), count=1)
            acc += part1 * s1
        slot, phase = _advance(slot1, phase1, ST)
    return acc, slot, phase


@gluon.jit
def _fp8_product(scales, steps, slot, phase, ring, WG: gl.constexpr, C: gl.constexpr):
    """The same for E4M3 weights with KG scales a K step and 8 rows: promoted every 128 / KG columns."""
    weights, _offsets, tokens, _scales4, scales8, full, empty = ring
    NT: gl.constexpr = C.shared_tokens
    ST: gl.constexpr = C.stages
    KG: gl.constexpr = C.geometry.scale_groups
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, NT, 32])
    KW: gl.constexpr = 128 // KG
    zero = gl.zeros([64, NT], gl.float32, mma)
    acc = gl.zeros([64, NT], gl.float32, mma)
    group = gl.arange(0, 64, gl.SliceLayout(1, mma)) // 8
    at = scales + group
    w0 = gl.load(at)
    for step in range(steps):
        # The next step's first scales are on their way while this step multiplies; the last step reads its own again.
        following = at + gl.where(step + 1 < steps, 32 * KG, 0)
        if KG > 1:
            w1 = gl.load(at + 8)
            w2 = gl.load(at + 16)
            w3 = gl.load(at + 24)
        mbarrier.wait(full.index(slot), phase)
        next0 = gl.load(following)
        a = weights.index(slot).slice(WG * 64, 64)
        x = tokens.index(slot).slice(0, NT)
        s = scales8.index(slot).slice(0, NT, 1).load(mma)
        if KG == 1:
            p = warpgroup_mma(a, x.permute((1, 0)), zero, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(p,))
            mbarrier.arrive(empty.index(slot), count=1)
            acc += part * (s * w0.expand_dims(1))
        else:
            p0 = warpgroup_mma(a.slice(0, KW, 1), x.slice(0, KW, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
            p1 = warpgroup_mma(
                a.slice(KW, KW, 1), x.slice(KW, KW, 1).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            part0 = warpgroup_mma_wait(1, deps=(p0,))
            acc += part0 * (s * w0.expand_dims(1))
            p2 = warpgroup_mma(
                a.slice(2 * KW, KW, 1), x.slice(2 * KW, KW, 1).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            part1 = warpgroup_mma_wait(1, deps=(p1,))
            acc += part1 * (s * w1.expand_dims(1))
            p3 = warpgroup_mma(
                a.slice(3 * KW, KW, 1), x.slice(3 * KW, KW, 1).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            part2 = warpgroup_mma_wait(1, deps=(p2,))
            acc += part2 * (s * w2.expand_dims(1))
            part3 = warpgroup_mma_wait(0, deps=(p3,))
            mbarrier.arrive(empty.index(slot), count=1)
            acc += part3 * (s * w3.expand_dims(1))
        at = following
        w0 = next0
        slot, phase = _advance(slot, phase, ST)
    return acc, slot, phase


@gluon.jit
def _swiglu(acc, LIMIT: gl.constexpr, NT: gl.constexpr):
    """Rows 0..7 of every 16 are gate, 8..15 up: both in one thread. NaN passes the clamp."""
    gate, up = acc.reshape([4, 2, 8, NT]).permute((0, 2, 3, 1)).split()
    if float("inf") > LIMIT:
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    gate = gl.inline_asm_elementwise(_SILU, "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1)
    return (gate * up).reshape([32, NT])


@gluon.jit
def _store_hidden(hidden, h, row, rows, column, inverse, NT: gl.constexpr, ROUTED: gl.constexpr, C: gl.constexpr):
    """32 features of a block from ``column`` on; a routed tile's in the order of ``pack.column_order``."""
    HL: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    q = gl.convert_layout((hidden * inverse.expand_dims(0)).to(gl.float8e4nv), HL)
    token = gl.arange(0, NT, gl.SliceLayout(0, HL))
    feature = gl.arange(0, 32, gl.SliceLayout(1, HL))
    if ROUTED:
        place = column // 128 * 128 + column % 128 // 32 * 4
        place += feature // 8 * 32 + feature // 4 % 2 * 16 + feature % 4
    else:
        place = column + feature
    at = h + (row + token).to(gl.int64).expand_dims(0) * C.geometry.h_stride + place.expand_dims(1)
    gl.store(at, q, mask=(token < rows).expand_dims(0))


@gluon.jit
def _finish_up(
    hidden,
    amax,
    out,
    row,
    rows,
    block,
    counter,
    turn,
    kept,
    amax_bufs,
    amax_full,
    NT: gl.constexpr,
    ROUTED: gl.constexpr,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    """Quantise one 128-column block of the hidden vector (all warpgroups' parts share a scale), store it, count it."""
    h, hs, done, row_capacity, _d = out
    WGS: gl.constexpr = C.warpgroups
    half = turn & 1
    amax_bufs.index(half * WGS + WG).slice(0, NT).store(amax)
    _barrier()
    mbarrier.arrive(amax_full, count=1)
    mbarrier.wait(amax_full, half)
    for other in gl.static_range(WGS):
        if other != WG:
            amax = gl.maximum(amax, amax_bufs.index(half * WGS + other).slice(0, NT).load(amax.type.layout))
    amax = gl.maximum(amax, 1e-4)
    bits = amax.to(gl.int32, bitcast=True)
    power = (bits >> 23) - 127 - 8 + gl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)  # ceil(log2(amax / 448))
    scale = ((power + 127) << 23).to(gl.float32, bitcast=True)
    inverse = ((127 - power) << 23).to(gl.float32, bitcast=True)
    column = block * 128 + WG * 32
    if WGS == 2:
        _store_hidden(hidden, h, row, rows, column + 64, inverse, NT, ROUTED, C)
        _store_hidden(
            kept.index(WG).slice(0, NT, 1).load(hidden.type.layout), h, row, rows, column, inverse, NT, ROUTED, C
        )
    else:
        _store_hidden(hidden, h, row, rows, column, inverse, NT, ROUTED, C)
    if WG == 0:
        token = gl.arange(0, NT, scale.type.layout)
        gl.store(hs + block.to(gl.int64) * row_capacity + row + token, scale, mask=token < rows)
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1
    )
    _barrier()
    gl.atomic_add(done + counter, 1, sem="release", scope="gpu")


@gluon.jit
def _hidden_block(
    hidden,
    half,
    out,
    row,
    rows,
    block,
    counter,
    turn,
    kept,
    amax_bufs,
    amax_full,
    NT: gl.constexpr,
    ROUTED: gl.constexpr,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    """A pass's part of one 128-column block: kept until the last pass of this warpgroup, which finishes the block."""
    amax = gl.max(gl.abs(hidden), axis=0)
    if C.halves == 1:
        _finish_up(hidden, amax, out, row, rows, block, counter, turn, kept, amax_bufs, amax_full, NT, ROUTED, WG, C)
        turn += 1
    elif half == 0:
        kept.index(WG).slice(0, NT, 1).store(hidden)
        amax_bufs.index(2 * C.warpgroups + WG).slice(0, NT).store(amax)
    else:
        amax = gl.maximum(amax, amax_bufs.index(2 * C.warpgroups + WG).slice(0, NT).load(amax.type.layout))
        _finish_up(hidden, amax, out, row, rows, block, counter, turn, kept, amax_bufs, amax_full, NT, ROUTED, WG, C)
        turn += 1
    return turn


@gluon.jit
def _finish_down(acc, out, row, rows, first, C: gl.constexpr):
    _h, _hs, _done, _row_capacity, d = out
    mma: gl.constexpr = acc.type.layout
    token = gl.arange(0, acc.shape[1], gl.SliceLayout(0, mma)).expand_dims(0)
    column = first + gl.arange(0, 64, gl.SliceLayout(1, mma)).expand_dims(1)
    at = d + (row + token).to(gl.int64) * C.geometry.hidden + column
    gl.store(at, acc, mask=(token < rows) & (column < C.geometry.hidden))


@gluon.jit
def _row_scaled(acc, scale):
    """Times each row's reference exponent (a power of two)."""
    row = gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    return acc * gl.load(scale + row).expand_dims(1)


@gluon.jit
def _late(value):
    """The same number, but unknown to the compiler before this point: addresses made from it are not held over a K
    loop, which has no registers for them.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [value], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _routed_tile(
    tile,
    steps,
    rs,
    out,
    slot,
    phase,
    turn,
    ring,
    kept,
    amax,
    amax_full,
    NT: gl.constexpr,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    """One tile of routed experts. One copy of the K loop serves both projections: the code must stay small (a kernel
    with one a case stalled a fifth of its time on instruction fetches).
    """
    g: gl.constexpr = C.geometry
    WGS: gl.constexpr = C.warpgroups
    HALVES: gl.constexpr = C.halves
    up, expert, block, row, rows, counter = tile
    k_up, k_down4, _k_down8 = steps
    rs1, rs2 = rs
    for half in range(gl.where(up, HALVES, 1)):
        acc, slot, phase = _fp4_product(gl.where(up, k_up, k_down4), slot, phase, ring, NT, WG, C)
        first, column = _late(row), _late(block)
        if up:
            scale = rs1 + (expert * g.up4 + column) * 256 + (half * WGS + WG) * 64
            hidden = _swiglu(_row_scaled(acc, scale), g.limit4, NT)
            turn = _hidden_block(
                hidden, half, out, first, rows, column, counter, turn, kept, amax, amax_full, NT, True, WG, C
            )
        else:
            scale = rs2 + (expert * g.down4 * HALVES + column) * (WGS * 64) + WG * 64
            _finish_down(_row_scaled(acc, scale), out, first, rows, (column * WGS + WG) * 64, C)
    return slot, phase, turn


@gluon.jit
def _shared_tile(
    tile, steps, ws, out, slot, phase, turn, ring, kept, amax, amax_full, WG: gl.constexpr, C: gl.constexpr
):
    """One tile of the shared expert, likewise."""
    g: gl.constexpr = C.geometry
    NT: gl.constexpr = C.shared_tokens
    WGS: gl.constexpr = C.warpgroups
    HALVES: gl.constexpr = C.halves
    up, _expert, block, row, rows, counter = tile
    k_up, _k_down4, k_down8 = steps
    ws1, ws2 = ws
    for half in range(gl.where(up, HALVES, 1)):
        if up:
            scales = ws1 + (block * k_up * 4 + half * WGS + WG) * (8 * g.scale_groups)
        else:
            scales = ws2 + (block // HALVES * k_down8 * 4 + block % HALVES * WGS + WG) * (8 * g.scale_groups)
        acc, slot, phase = _fp8_product(scales, gl.where(up, k_up, k_down8), slot, phase, ring, WG, C)
        first, column = _late(row), _late(block)
        if up:
            hidden = _swiglu(acc, g.limit8, NT)
            turn = _hidden_block(
                hidden, half, out, first, rows, column, counter, turn, kept, amax, amax_full, NT, False, WG, C
            )
        else:
            _finish_down(acc, out, first, rows, (column * WGS + WG) * 64, C)
    return slot, phase, turn


@gluon.jit
def _consumer(
    steps,
    rs,
    ws,
    out,
    control,
    capacity,
    run,
    ring,
    tickets,
    kept,
    amax_bufs,
    amax_full,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    amax4, amax8 = amax_bufs
    head = _read_head(control, run)
    slot = 0
    phase = 0
    tslot = 0
    tphase = 0
    turn = 0
    ticket, tslot, tphase = _receive(tickets, tslot, tphase, 4)
    while ticket >= 0:
        shared, up, expert, block, row, rows, counter = _locate(ticket, head, control, capacity, C)
        tile = (up, expert, block, row, rows, counter)
        if shared:
            if C.geometry.up8 > 0:
                slot, phase, turn = _shared_tile(
                    tile, steps, ws, out, slot, phase, turn, ring, kept, amax8, amax_full, WG, C
                )
        else:
            if C.tail == 0:
                slot, phase, turn = _routed_tile(
                    tile, steps, rs, out, slot, phase, turn, ring, kept, amax4, amax_full, C.tokens, WG, C
                )
            elif rows <= C.tail:
                slot, phase, turn = _routed_tile(
                    tile, steps, rs, out, slot, phase, turn, ring, kept, amax4, amax_full, C.tail, WG, C
                )
            else:
                slot, phase, turn = _routed_tile(
                    tile, steps, rs, out, slot, phase, turn, ring, kept, amax4, amax_full, C.tokens, WG, C
                )
        ticket, tslot, tphase = _receive(tickets, tslot, tphase, 4)


@gluon.jit(do_not_specialize=["run", "capacity", "row_capacity", "k_up", "k_down4", "k_down8"])
def folded_moe(
    codes1,
    exps1,
    codes2,
    exps2,
    shared1,
    shared2,
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
    ws1,
    ws2,
    h,
    hs,
    d,
    control,
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
        codes1 .. shared2: descriptors of the packed weights (see ``pack.py``): up then down.
        x4 .. hs8: descriptors of quantised tokens, their scales, hidden vectors and theirs; routed then shared tiles.
        rs1, rs2: reference scale of every packed routed row; ws1, ws2: shared scales by unit, group and 8 rows.
        h, hs, d: hidden vectors, their scales ``[column block, row]``, down products float32 ``[row, H]``.
        control: the control block (``workspace.py``). error: four words of host memory.
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
    gl.inline_asm_elementwise(_AFTER_PROLOGUE, "=r,r", [capacity], dtype=gl.int32, is_pure=False, pack=1)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [ST, WGS * 64, 128], gl.NVMMASharedLayout(128, 8, 2))
    offsets = gl.allocate_shared_memory(gl.uint8, [ST, WGS, 256], exps1.layout)
    tokens = gl.allocate_shared_memory(gl.float8e4nv, [ST, NX, 128], x4.layout)
    scales4 = gl.allocate_shared_memory(gl.float32, [ST, 1, max(NT, 32)], xs4.layout)
    scales8 = gl.allocate_shared_memory(gl.float32, [ST, 1, max(NTS, 32)], xs8.layout)
    amax4 = gl.allocate_shared_memory(gl.float32, [3 * WGS, NT], plain)
    amax8 = gl.allocate_shared_memory(gl.float32, [3 * WGS, NTS], plain)
    values = gl.allocate_shared_memory(gl.int32, [TICKETS, 1], plain)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    ticket_full = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], mbarrier.MBarrierLayout())
    ticket_empty = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], mbarrier.MBarrierLayout())
    amax_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for i in gl.static_range(ST):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=WGS)
    for i in gl.static_range(TICKETS):
        mbarrier.init(ticket_full.index(i), count=1)
        mbarrier.init(ticket_empty.index(i), count=WGS + 1)
    mbarrier.init(amax_full, count=WGS)
    ring = (weights, offsets, tokens, scales4, scales8, full, empty)
    tickets = (values, ticket_full, ticket_empty)
    out = (h, hs, control + HEAD + 5 * capacity, row_capacity, d)
    steps = (k_up, k_down4, k_down8)
    rs = (rs1, rs2)
    ws = (ws1, ws2)
    amax = (amax4, amax8)
    copies = (codes1, exps1, codes2, exps2, shared1, shared2)
    inputs = (x4, xs4, h4, hs4, x8, xs8, h8, hs8)
    if WGS == 2:
        kept = gl.allocate_shared_memory(gl.float32, [2, 32, NX], gl.SwizzledSharedLayout(8, 1, NX // 16, [1, 0]))
        gl.warp_specialize(
            [
                (_consumer, (steps, rs, ws, out, control, capacity, run, ring, tickets, kept, amax, amax_full, 0, C)),
                (_consumer, (steps, rs, ws, out, control, capacity, run, ring, tickets, kept, amax, amax_full, 1, C)),
                (_weights_producer, (copies, control, capacity, run, ring, tickets, C)),
                (_tokens_producer, (inputs, control, capacity, run, error, ring, tickets, C)),
            ],
            [4, 1, 1],
            [C.registers, 32, 32],
        )
    else:
        kept = values
        gl.warp_specialize(
            [
                (_consumer, (steps, rs, ws, out, control, capacity, run, ring, tickets, kept, amax, amax_full, 0, C)),
                (_consumer, (steps, rs, ws, out, control, capacity, run, ring, tickets, kept, amax, amax_full, 1, C)),
                (_consumer, (steps, rs, ws, out, control, capacity, run, ring, tickets, kept, amax, amax_full, 2, C)),
                (_consumer, (steps, rs, ws, out, control, capacity, run, ring, tickets, kept, amax, amax_full, 3, C)),
                (_weights_producer, (copies, control, capacity, run, ring, tickets, C)),
                (_tokens_producer, (inputs, control, capacity, run, error, ring, tickets, C)),
            ],
            [4, 4, 4, 1, 1],
            [C.registers, C.registers, C.registers, 32, 32],
        )
