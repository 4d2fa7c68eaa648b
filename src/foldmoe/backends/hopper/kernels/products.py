"""Sums over K of weights times tokens, promoted to float32 with their scales."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from foldmoe.backends.hopper.kernels.copies import fp4_view
from foldmoe.backends.hopper.kernels.tickets import advance

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
def fp4_product(steps, slot, phase, ring, NT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
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
        slot1, phase1 = advance(slot, phase, ST)
        mbarrier.wait(full.index(slot), phase)
        a0 = _upcast(fp4_view(weights, slot, WGS).slice(WG * 16, 16), offsets.index(slot).slice(WG, 1), dot_layout)
        p0 = warpgroup_mma(a0, tokens.index(slot).slice(0, NT).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(full.index(slot1), phase1)
        a1 = _upcast(fp4_view(weights, slot1, WGS).slice(WG * 16, 16), offsets.index(slot1).slice(WG, 1), dot_layout)
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
        slot, phase = advance(slot1, phase1, ST)
    return acc, slot, phase


@gluon.jit
def fp8_product(scales, steps, slot, phase, ring, WG: gl.constexpr, C: gl.constexpr):
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
        slot, phase = advance(slot, phase, ST)
    return acc, slot, phase
