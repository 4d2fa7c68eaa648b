"""Sums over K of weights times tokens, promoted to float32 with their scales."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from foldmoe.backends.hopper.kernels.copies import fp4_view, scale_view
from foldmoe.backends.hopper.kernels.cut import STEP, keep
from foldmoe.backends.hopper.kernels.tickets import advance, finish_reads

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
def fp4_product(steps, slot, phase, kept, ring, NT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Sums over K of codes x tokens, promoted to float32 times the token's scale every 128 columns.

    ``kept``: where products are kept, and of how many tokens, if K may be cut (``cut.py``).

    Returns the warpgroup's sums in one tuple, unit after unit of each group of columns, and the ring's next slot.
    """
    if C.units == 1:
        return _one_unit(steps, slot, phase, kept, ring, NT, WG, C)
    elif first_group(NT) == NT:
        return _two_units(steps, slot, phase, ring, NT, WG, C)
    else:
        return _two_groups(steps, slot, phase, ring, first_group(NT), NT - first_group(NT), WG, C)


@gluon.jit
def _operand(ring, slot, unit: gl.constexpr, N: gl.constexpr, C: gl.constexpr):
    """A unit's codes in a slot as the A operand of products of N columns."""
    weights, offsets, _tokens, _scales4, _scales8, _full, _empty = ring
    mma: gl.constexpr = accumulator(N)
    codes = fp4_view(weights, slot, C.warpgroups).slice(unit * 16, 16)
    return _upcast(codes, offsets.index(slot).slice(unit, 1), gl.DotOperandLayout(0, mma, 4))


@gluon.constexpr_function
def first_group(columns):
    """Of a tile's columns, those of its first product: the largest power of two, at most 64."""
    return min(64, 1 << (columns.bit_length() - 1))


@gluon.constexpr_function
def accumulator(columns):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@gluon.jit
def _one_unit(steps, slot, phase, kept, ring, NT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Two steps a turn: an FP8 operand carried round the loop costs byte shuffles. An odd K ends in a step of zeros."""
    _weights, _offsets, tokens, scales4, _scales8, full, empty = ring
    ST: gl.constexpr = C.stages
    mma: gl.constexpr = accumulator(NT)
    zero = gl.zeros([64, NT], gl.float32, mma)
    acc = gl.zeros([64, NT], gl.float32, mma)
    if C.parts > 1:
        at, rows = kept
    for _ in range((steps + 1) // 2):
        slot1, phase1 = advance(slot, phase, ST)
        mbarrier.wait(full.index(slot), phase)
        a0 = _operand(ring, slot, WG, NT, C)
        p0 = warpgroup_mma(a0, tokens.index(slot).slice(0, NT).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(full.index(slot1), phase1)
        a1 = _operand(ring, slot1, WG, NT, C)
        p1 = warpgroup_mma(a1, tokens.index(slot1).slice(0, NT).permute((1, 0)), zero, use_acc=False, is_async=True)
        s0 = scales4.index(slot).slice(0, NT, 1).load(mma)
        s1 = scales4.index(slot1).slice(0, NT, 1).load(mma)
        part = warpgroup_mma_wait(1, deps=(p0,))
        finish_reads()
        mbarrier.arrive(empty.index(slot), count=1)
        acc += part * s0
        if C.parts > 1:
            keep(part * s0, at, rows)
        part1 = warpgroup_mma_wait(0, deps=(p1,))
        mbarrier.arrive(empty.index(slot1), count=1)
        acc += part1 * s1
        if C.parts > 1:
            keep(part1 * s1, at + STEP, rows)
            at += 2 * STEP
        slot, phase = advance(slot1, phase1, ST)
    return (acc,), slot, phase


@gluon.jit
def _two_units(steps, slot, phase, ring, NT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """A step's tokens meet both units while they are in the ring: with 128 rows at a time L2 could not bring them."""
    _weights, _offsets, tokens, scales4, _scales8, full, empty = ring
    ST: gl.constexpr = C.stages
    WGS: gl.constexpr = C.warpgroups
    mma: gl.constexpr = accumulator(NT)
    zero = gl.zeros([64, NT], gl.float32, mma)
    acc0 = gl.zeros([64, NT], gl.float32, mma)
    acc1 = gl.zeros([64, NT], gl.float32, mma)
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        x = tokens.index(slot).slice(0, NT).permute((1, 0))
        s = scales4.index(slot).slice(0, NT, 1).load(mma)
        a0 = _operand(ring, slot, WG, NT, C)
        finish_reads()
        p0 = warpgroup_mma(a0, x, zero, use_acc=False, is_async=True)
        a1 = _operand(ring, slot, WGS + WG, NT, C)
        p1 = warpgroup_mma(a1, x, zero, use_acc=False, is_async=True)
        part0 = warpgroup_mma_wait(1, deps=(p0,))
        acc0 += part0 * s
        part1 = warpgroup_mma_wait(0, deps=(p1,))
        mbarrier.arrive(empty.index(slot), count=1)
        acc1 += part1 * s
        slot, phase = advance(slot, phase, ST)
    return (acc0, acc1), slot, phase


@gluon.jit
def _two_groups(steps, slot, phase, ring, N0: gl.constexpr, N1: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """The same for N0 + N1 columns, one group of them at a time: a product in flight while the one before it is
    promoted, no more registers than one of 128 columns takes, and tiles that no power of two fits.
    """
    _weights, _offsets, tokens, scales4, _scales8, full, empty = ring
    ST: gl.constexpr = C.stages
    WGS: gl.constexpr = C.warpgroups
    mma0: gl.constexpr = accumulator(N0)
    mma1: gl.constexpr = accumulator(N1)
    zero0 = gl.zeros([64, N0], gl.float32, mma0)
    zero1 = gl.zeros([64, N1], gl.float32, mma1)
    acc00 = gl.zeros([64, N0], gl.float32, mma0)
    acc01 = gl.zeros([64, N0], gl.float32, mma0)
    acc10 = gl.zeros([64, N1], gl.float32, mma1)
    acc11 = gl.zeros([64, N1], gl.float32, mma1)
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        x0 = tokens.index(slot).slice(0, N0).permute((1, 0))
        x1 = tokens.index(slot).slice(N0, N1).permute((1, 0))
        a0 = _operand(ring, slot, WG, N0, C)
        p = warpgroup_mma(a0, x0, zero0, use_acc=False, is_async=True)
        s = scales4.index(slot).slice(0, N0, 1).load(mma0)
        part00 = warpgroup_mma_wait(0, deps=(p,))
        q = warpgroup_mma(_again(a0, N1), x1, zero1, use_acc=False, is_async=True)
        acc00 += part00 * s
        a1 = _operand(ring, slot, WGS + WG, N0, C)
        t = scales4.index(slot).slice(N0, N1, 1).load(mma1)
        part10 = warpgroup_mma_wait(0, deps=(q,))
        p = warpgroup_mma(a1, x0, zero0, use_acc=False, is_async=True)
        acc10 += part10 * t
        s = scales4.index(slot).slice(0, N0, 1).load(mma0)
        part01 = warpgroup_mma_wait(0, deps=(p,))
        q = warpgroup_mma(_again(a1, N1), x1, zero1, use_acc=False, is_async=True)
        acc01 += part01 * s
        t = scales4.index(slot).slice(N0, N1, 1).load(mma1)
        part11 = warpgroup_mma_wait(0, deps=(q,))
        finish_reads()
        mbarrier.arrive(empty.index(slot), count=1)
        acc11 += part11 * t
        slot, phase = advance(slot, phase, ST)
    return (acc00, acc01, acc10, acc11), slot, phase


@gluon.jit
def _again(operand, N: gl.constexpr):
    """The same registers as the A operand of products of N columns."""
    return gl.convert_layout(operand, gl.DotOperandLayout(0, accumulator(N), 4), assert_trivial=True)


@gluon.jit
def fp4_chain(steps, slot, phase, ring, NT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """The same sums in the tensor core over all of K, unscaled, all columns in one group: for tokens with one scale
    each. Two steps a turn; a unit's products are waited for before the next but one's operand takes its registers.
    """
    _weights, _offsets, tokens, _scales4, _scales8, full, empty = ring
    ST: gl.constexpr = C.stages
    WGS: gl.constexpr = C.warpgroups
    acc0 = gl.zeros([64, NT], gl.float32, accumulator(NT))
    acc1 = acc0
    for _ in range((steps + 1) // 2):
        slot1, phase1 = advance(slot, phase, ST)
        mbarrier.wait(full.index(slot), phase)
        x = tokens.index(slot).slice(0, NT).permute((1, 0))
        acc0 = warpgroup_mma(_operand(ring, slot, WG, NT, C), x, acc0, is_async=True)
        if C.units == 2:
            acc1 = warpgroup_mma(_operand(ring, slot, WGS + WG, NT, C), x, acc1, is_async=True)
            acc0 = warpgroup_mma_wait(1, deps=(acc0,))
        mbarrier.wait(full.index(slot1), phase1)
        x = tokens.index(slot1).slice(0, NT).permute((1, 0))
        acc0 = warpgroup_mma(_operand(ring, slot1, WG, NT, C), x, acc0, is_async=True)
        if C.units == 2:
            acc1 = warpgroup_mma_wait(1, deps=(acc1,))
            acc1 = warpgroup_mma(_operand(ring, slot1, WGS + WG, NT, C), x, acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
        else:
            acc0 = warpgroup_mma_wait(0, deps=(acc0,))
        mbarrier.arrive(empty.index(slot), count=1)
        mbarrier.arrive(empty.index(slot1), count=1)
        slot, phase = advance(slot1, phase1, ST)
    if C.units == 1:
        return (acc0,), slot, phase
    else:
        return (acc0, acc1), slot, phase


@gluon.jit
def group_scales(offsets, slot, row: gl.constexpr, layout: gl.constexpr, KG: gl.constexpr):
    """A unit's scales of one column group: one for every 8 rows, spread over the 64."""
    spread: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1, 0]], [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]], [[0, 2, 0], [0, 4, 0]], [], [1, 8, 8]
    )
    w = scale_view(offsets, slot, KG).slice(row, 1).load(gl.SliceLayout(2, spread))
    w = w.expand_dims(2).broadcast_to([1, 8, 8]).reshape([64])
    return gl.convert_layout(w, gl.SliceLayout(1, layout), assert_trivial=True).expand_dims(1)


@gluon.jit
def fp8_product(steps, slot, phase, kept, ring, WG: gl.constexpr, C: gl.constexpr):
    """The same for E4M3 weights with KG scales a K step and 8 rows: promoted every 128 / KG columns."""
    weights, offsets, tokens, _scales4, scales8, full, empty = ring
    NT: gl.constexpr = C.shared_tokens
    ST: gl.constexpr = C.stages
    KG: gl.constexpr = C.geometry.scale_groups
    mma: gl.constexpr = accumulator(NT)
    KW: gl.constexpr = 128 // KG
    zero = gl.zeros([64, NT], gl.float32, mma)
    acc = gl.zeros([64, NT], gl.float32, mma)
    if C.parts > 1:
        at, rows = kept
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        a = weights.index(slot).slice(WG * 64, 64)
        x = tokens.index(slot).slice(0, NT)
        s = scales8.index(slot).slice(0, NT, 1).load(mma)
        w0 = group_scales(offsets, slot, WG * KG, mma, KG)
        if KG == 1:
            p = warpgroup_mma(a, x.permute((1, 0)), zero, use_acc=False, is_async=True)
            part = warpgroup_mma_wait(0, deps=(p,))
            finish_reads()
            mbarrier.arrive(empty.index(slot), count=1)
            acc += part * (s * w0)
            if C.parts > 1:
                keep(part * (s * w0), at, rows)
                at += STEP
        else:
            w1 = group_scales(offsets, slot, WG * KG + 1, mma, KG)
            w2 = group_scales(offsets, slot, WG * KG + 2, mma, KG)
            w3 = group_scales(offsets, slot, WG * KG + 3, mma, KG)
            p0 = warpgroup_mma(a.slice(0, KW, 1), x.slice(0, KW, 1).permute((1, 0)), zero, use_acc=False, is_async=True)
            p1 = warpgroup_mma(
                a.slice(KW, KW, 1), x.slice(KW, KW, 1).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            part0 = warpgroup_mma_wait(1, deps=(p0,))
            acc += part0 * (s * w0)
            p2 = warpgroup_mma(
                a.slice(2 * KW, KW, 1), x.slice(2 * KW, KW, 1).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            part1 = warpgroup_mma_wait(1, deps=(p1,))
            acc += part1 * (s * w1)
            p3 = warpgroup_mma(
                a.slice(3 * KW, KW, 1), x.slice(3 * KW, KW, 1).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            part2 = warpgroup_mma_wait(1, deps=(p2,))
            acc += part2 * (s * w2)
            part3 = warpgroup_mma_wait(0, deps=(p3,))
            finish_reads()
            mbarrier.arrive(empty.index(slot), count=1)
            acc += part3 * (s * w3)
        slot, phase = advance(slot, phase, ST)
    return acc, slot, phase
