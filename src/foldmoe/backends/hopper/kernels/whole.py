"""Tiles of FP8 and bf16 experts, whose weights are multiplied as they lie in shared memory.

A slot of the ring holds 256 rows of weights, 128 bytes each: 128 columns of E4M3 with KG scales for every 8 rows, or 64
columns of bf16. A tile of either set is one pass over K; each warpgroup multiplies its one or two units of 64 rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from foldmoe.backends.hopper.kernels.epilogue import (
    count_stored,
    finish_down_tile,
    finish_up_tile,
    for_copies,
    store_hidden,
    swiglu,
)
from foldmoe.backends.hopper.kernels.products import accumulator, group_scales
from foldmoe.backends.hopper.kernels.tickets import advance, finish_reads, late


@gluon.jit
def _fp8_start(
    ring, slot, unit: gl.constexpr, group: gl.constexpr, first: gl.constexpr, N: gl.constexpr, KG: gl.constexpr
):
    """Begin the product of a unit's rows with N tokens over one column group of a slot."""
    weights, _offsets, tokens, _scales4, _scales8, _full, _empty = ring
    KW: gl.constexpr = 128 // KG
    zero = gl.zeros([64, N], gl.float32, accumulator(N))
    a = weights.index(slot).slice(unit * 64, 64)
    x = tokens.index(slot).slice(first, N)
    if KG > 1:
        a = a.slice(group * KW, KW, 1)
        x = x.slice(group * KW, KW, 1)
    return warpgroup_mma(a, x.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _fp8_scales(
    ring, slot, unit: gl.constexpr, group: gl.constexpr, first: gl.constexpr, N: gl.constexpr, KG: gl.constexpr
):
    """What that product is multiplied by: the rows' scales times the tokens'."""
    _weights, offsets, _tokens, scales4, _scales8, _full, _empty = ring
    s = scales4.index(slot).slice(first, N, 1).load(accumulator(N))
    return s * group_scales(offsets, slot, unit * KG + group, accumulator(N), KG)


@gluon.jit
def _fp8_narrow(steps, slot, phase, ring, NT: gl.constexpr, KG: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Up to 64 tokens: one product in flight while the one before it is promoted to float32."""
    _weights, _offsets, _tokens, _scales4, _scales8, full, empty = ring
    WGS: gl.constexpr = C.warpgroups
    LAST: gl.constexpr = KG * C.units - 1
    acc0 = gl.zeros([64, NT], gl.float32, accumulator(NT))
    acc1 = gl.zeros([64, NT], gl.float32, accumulator(NT))
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        p = _fp8_start(ring, slot, WG, 0, 0, NT, KG)
        for j in gl.static_range(LAST):
            following = _fp8_start(ring, slot, (j + 1) // KG * WGS + WG, (j + 1) % KG, 0, NT, KG)
            scale = _fp8_scales(ring, slot, j // KG * WGS + WG, j % KG, 0, NT, KG)
            part = warpgroup_mma_wait(1, deps=(p,))
            if j < KG:
                acc0 += part * scale
            else:
                acc1 += part * scale
            p = following
        scale = _fp8_scales(ring, slot, LAST // KG * WGS + WG, LAST % KG, 0, NT, KG)
        part = warpgroup_mma_wait(0, deps=(p,))
        finish_reads()
        mbarrier.arrive(empty.index(slot), count=1)
        if C.units == 1:
            acc0 += part * scale
        else:
            acc1 += part * scale
        slot, phase = advance(slot, phase, C.stages)
    if C.units == 1:
        return (acc0,), slot, phase
    else:
        return (acc0, acc1), slot, phase


@gluon.jit
def _fp8_wide(steps, slot, phase, ring, WG: gl.constexpr, C: gl.constexpr):
    """128 tokens, 64 at a time, with one scale a step: no more registers than one product of 128 takes.

    Scales of rows and tokens are multiplied after the wait only: before it, their products would take 32 registers.
    """
    _weights, offsets, _tokens, scales4, _scales8, full, empty = ring
    OTHER: gl.constexpr = C.warpgroups + WG
    mma: gl.constexpr = accumulator(64)
    acc00 = gl.zeros([64, 64], gl.float32, mma)
    acc01 = gl.zeros([64, 64], gl.float32, mma)
    acc10 = gl.zeros([64, 64], gl.float32, mma)
    acc11 = gl.zeros([64, 64], gl.float32, mma)
    for _ in range(steps):
        mbarrier.wait(full.index(slot), phase)
        p = _fp8_start(ring, slot, WG, 0, 0, 64, 1)
        s = scales4.index(slot).slice(0, 64, 1).load(mma)
        w = group_scales(offsets, slot, WG, mma, 1)
        part00 = warpgroup_mma_wait(0, deps=(p,))
        p = _fp8_start(ring, slot, WG, 0, 64, 64, 1)
        acc00 += part00 * (s * w)
        s = scales4.index(slot).slice(64, 64, 1).load(mma)
        part10 = warpgroup_mma_wait(0, deps=(p,))
        p = _fp8_start(ring, slot, OTHER, 0, 0, 64, 1)
        acc10 += part10 * (s * w)
        s = scales4.index(slot).slice(0, 64, 1).load(mma)
        w = group_scales(offsets, slot, OTHER, mma, 1)
        part01 = warpgroup_mma_wait(0, deps=(p,))
        p = _fp8_start(ring, slot, OTHER, 0, 64, 64, 1)
        acc01 += part01 * (s * w)
        s = scales4.index(slot).slice(64, 64, 1).load(mma)
        part11 = warpgroup_mma_wait(0, deps=(p,))
        finish_reads()
        mbarrier.arrive(empty.index(slot), count=1)
        acc11 += part11 * (s * w)
        slot, phase = advance(slot, phase, C.stages)
    return (acc00, acc01, acc10, acc11), slot, phase


@gluon.jit
def _bf16(steps, slot, phase, ring, NT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Sums over all of K in the tensor core's registers, two steps a turn (there is an even number of them)."""
    weights, _offsets, tokens, _scales4, _scales8, full, empty = ring
    WGS: gl.constexpr = C.warpgroups
    UNITS: gl.constexpr = C.units
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, NT, 16])
    acc0 = gl.zeros([64, NT], gl.float32, mma)
    acc1 = gl.zeros([64, NT], gl.float32, mma)
    for _ in range(steps // 2):
        slot1, phase1 = advance(slot, phase, C.stages)
        mbarrier.wait(full.index(slot), phase)
        x = tokens.index(slot).slice(0, NT).permute((1, 0))
        acc0 = warpgroup_mma(weights.index(slot).slice(WG * 64, 64), x, acc0, is_async=True)
        if UNITS == 2:
            acc1 = warpgroup_mma(weights.index(slot).slice((WGS + WG) * 64, 64), x, acc1, is_async=True)
        mbarrier.wait(full.index(slot1), phase1)
        x = tokens.index(slot1).slice(0, NT).permute((1, 0))
        acc0 = warpgroup_mma(weights.index(slot1).slice(WG * 64, 64), x, acc0, is_async=True)
        if UNITS == 2:
            acc1 = warpgroup_mma(weights.index(slot1).slice((WGS + WG) * 64, 64), x, acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(2, deps=(acc0, acc1))
            mbarrier.arrive(empty.index(slot), count=1)
            acc0, acc1 = warpgroup_mma_wait(0, deps=(acc0, acc1))
        else:
            acc0 = warpgroup_mma_wait(1, deps=(acc0,))
            mbarrier.arrive(empty.index(slot), count=1)
            acc0 = warpgroup_mma_wait(0, deps=(acc0,))
        mbarrier.arrive(empty.index(slot1), count=1)
        slot, phase = advance(slot1, phase1, C.stages)
    if UNITS == 1:
        return (acc0,), slot, phase
    else:
        return (acc0, acc1), slot, phase


@gluon.jit
def _product(steps, slot, phase, ring, KG: gl.constexpr, NT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """A warpgroup's sums, unit after unit of each group of columns, and the ring's next slot."""
    if KG == 0:
        return _bf16(steps, slot, phase, ring, NT, WG, C)
    elif NT <= 64:
        return _fp8_narrow(steps, slot, phase, ring, NT, KG, WG, C)
    else:
        return _fp8_wide(steps, slot, phase, ring, WG, C)


@gluon.jit
def _finish_plain(sums, out, at, LIMIT: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """A warpgroup's part of a bf16 block of the hidden vector: no scale makes it wait for the others."""
    h, _hs, done, _row_capacity, _d = out
    row, rows, block, counter = at
    UNITS: gl.constexpr = C.units
    for unit in gl.static_range(UNITS):
        hidden = swiglu(sums[unit], LIMIT).to(gl.bfloat16)
        store_hidden(hidden, h, row, rows, block * 128 + (unit * C.warpgroups + WG) * 32, C)
    for_copies(block)
    count_stored(done, counter)


@gluon.jit
def whole_tile(
    tile,
    steps,
    out,
    slot,
    phase,
    exchange,
    ring,
    LIMIT: gl.constexpr,
    KG: gl.constexpr,
    NT: gl.constexpr,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    """One tile; KG is 0 for bf16. The producers, not this code, know which expert it is of."""
    up, _expert, block, row, rows, counter = tile
    k_up, k_down = steps
    turn = exchange[0]
    sums, slot, phase = _product(gl.where(up, k_up, k_down), slot, phase, ring, KG, NT, WG, C)
    first, column = late(row), late(block)
    none = (0, 0)
    if up:
        at = (first, rows, column, counter)
        if KG == 0:
            _finish_plain(sums, out, at, LIMIT, WG, C)
        else:
            turn = finish_up_tile(sums, none, out, at, exchange, LIMIT, False, False, WG, C)
    else:
        finish_down_tile(sums, none, out, first, rows, column, False, WG, C)
    return slot, phase, turn
