"""The two producer warps: copies of weights, and of tokens once what they need has been stored."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from foldmoe.backends.hopper.kernels.tickets import (
    HEAD,
    advance,
    after_prologue,
    cut,
    hand_out,
    late,
    locate,
    part_of,
    read_head,
    receive,
    ticket_count,
    wait_for,
)

# Names that changed between Triton 3.6 and 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
_OLD_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))


@gluon.jit
def _view(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
    if _OLD_REINTERPRET:
        return memory._reinterpret(dtype, shape, layout)
    else:
        return memory.reinterpret(dtype, shape, layout)


@gluon.jit
def fp4_view(weights, slot, WGS: gl.constexpr):
    """A slot's E2M1 codes."""
    return _view(weights.index(slot), gl.uint8, [WGS * 32, 256], gl.NVMMASharedLayout(0, 8, 2)).slice(0, 64)


@gluon.jit
def scale_view(offsets, slot, KG: gl.constexpr):
    """A slot's FP8 scales, four units of KG groups of 8 rows, where FP4 has its exponents."""
    return _view(offsets.index(slot), gl.float32, [32, 8], gl.NVMMASharedLayout(0, 32, 2)).slice(0, 4 * KG)


@gluon.jit
def _copy_fp4(codes, exponents, unit, steps, slot, phase, ring, C: gl.constexpr):
    weights, offsets, _tokens, _scales4, _scales8, full, empty = ring
    for _ in range(steps):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, 4 * 4352)
        tma_load(codes, [unit * 16, 0], bar, fp4_view(weights, slot, C.warpgroups))
        tma_load(exponents, [unit, 0], bar, offsets.index(slot))
        unit += 4
        slot, phase = advance(slot, phase, C.stages)
    return slot, phase


@gluon.jit
def _copy_fp8(values, scales, unit, steps, slot, phase, ring, KG: gl.constexpr, C: gl.constexpr):
    """bf16 too, whose rows are as wide; it has no scales (KG 0)."""
    UNITS: gl.constexpr = 4 if C.geometry.whole else C.warpgroups
    weights, offsets, _tokens, _scales4, _scales8, full, empty = ring
    for _ in range(steps):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        mbarrier.expect(bar, UNITS * 8192 + KG * 128)
        tma_load(values, [unit * 64, 0], bar, weights.index(slot))
        if KG > 0:
            tma_load(scales, [unit * KG, 0], bar, scale_view(offsets, slot, KG))
        unit += 4
        slot, phase = advance(slot, phase, C.stages)
    return slot, phase


@gluon.jit
def _copy_routed(stored, scales, unit, steps, slot, phase, ring, C: gl.constexpr):
    if C.geometry.whole:
        slot, phase = _copy_fp8(stored, scales, unit, steps, slot, phase, ring, C.geometry.routed_groups, C)
    else:
        slot, phase = _copy_fp4(stored, scales, unit, steps, slot, phase, ring, C)
    return slot, phase


@gluon.jit
def weights_producer(desc, control, capacity, run, ring, tickets, C: gl.constexpr):
    g: gl.constexpr = C.geometry
    PASSES: gl.constexpr = C.passes
    STEPS: gl.constexpr = C.routed_steps
    codes1, exps1, codes2, exps2, shared1, shared2, scales1, scales2 = desc
    after_prologue(run)
    head = read_head(control, run)
    parts = 1
    most = g.k_up
    if C.parts > 1:
        parts, most = cut(head, g.k_up, C)
    total = ticket_count(head, parts, C)
    slot = 0
    phase = 1
    tslot = 0
    tphase = 1
    ticket = gl.atomic_add(control + 3 + run, 1, sem="relaxed", scope="gpu")
    while ticket < total:
        tslot, tphase = hand_out(tickets, tslot, tphase, ticket)
        number, part = ticket, 0
        if C.parts > 1:
            number, part = part_of(ticket, head, parts, C)
        shared, up, expert, block, _row, _rows, _counter = locate(number, head, control, capacity, C)
        if shared:
            if g.up8 > 0:
                if up:
                    if C.parts > 1:
                        unit = (block * g.k_up + part * most) * 4
                        steps = gl.minimum(most, g.k_up - part * most)
                        slot, phase = _copy_fp8(shared1, scales1, unit, steps, slot, phase, ring, g.scale_groups, C)
                    else:
                        for half in range(PASSES):
                            unit = block * g.k_up * 4 + half * C.warpgroups
                            slot, phase = _copy_fp8(
                                shared1, scales1, unit, g.k_up, slot, phase, ring, g.scale_groups, C
                            )
                else:
                    unit = block // PASSES * g.k_down8 * 4 + block % PASSES * C.warpgroups
                    slot, phase = _copy_fp8(shared2, scales2, unit, g.k_down8, slot, phase, ring, g.scale_groups, C)
        else:
            if up:
                unit = (expert * g.up4 + block) * g.k_up * 4
                if C.parts > 1:
                    unit += part * most * 4
                    steps = gl.minimum(most, STEPS[0] - part * most)
                    slot, phase = _copy_routed(codes1, exps1, unit, steps, slot, phase, ring, C)
                else:
                    slot, phase = _copy_routed(codes1, exps1, unit, STEPS[0], slot, phase, ring, C)
            else:
                unit = (expert * g.down4 + block) * g.k_down4 * 4
                slot, phase = _copy_routed(codes2, exps2, unit, STEPS[1], slot, phase, ring, C)
        ticket = gl.atomic_add(control + 3 + run, 1, sem="relaxed", scope="gpu")
    hand_out(tickets, tslot, tphase, -1)


@gluon.jit
def _copy_tokens(x, xs, row, first, end, slot, phase, tokens, scales, full, empty, NT: gl.constexpr, C: gl.constexpr):
    for kb in range(first, end):
        mbarrier.wait(empty.index(slot), phase)
        bar = full.index(slot)
        if C.geometry.quantised:
            mbarrier.expect(bar, NT * 128 + max(NT, 32) * 4)
            tma_load(xs, [kb, row], bar, scales.index(slot))
        else:
            mbarrier.expect(bar, NT * 128)
        tma_load(x, [row, kb * C.geometry.step], bar, tokens.index(slot).slice(0, NT))
        slot, phase = advance(slot, phase, C.stages)
    return slot, phase


@gluon.jit
def tokens_producer(desc, control, capacity, run, error, ring, tickets, C: gl.constexpr):
    g: gl.constexpr = C.geometry
    NT: gl.constexpr = C.tokens
    NTS: gl.constexpr = C.shared_tokens
    WGS: gl.constexpr = C.warpgroups
    STEPS: gl.constexpr = C.routed_steps
    x4, xs4, h4, hs4, x8, xs8, h8, hs8 = desc
    after_prologue(run)
    _weights, _offsets, tokens, scales4, scales8, full, empty = ring
    head = read_head(control, run)
    slot = 0
    phase = 1
    tslot = 0
    tphase = 0
    parts = 1
    most = g.k_up
    if C.parts > 1:
        parts, most = cut(head, g.k_up, C)
    ticket, tslot, tphase = receive(tickets, tslot, tphase, 1)
    while ticket >= 0:
        number, part = ticket, 0
        if C.parts > 1:
            number, part = part_of(ticket, head, parts, C)
        shared, up, _expert, _block, row, _rows, counter = locate(number, head, control, capacity, C)
        if not up:
            wanted = gl.where(shared, g.up8, g.up4) * WGS
            wait_for(control + HEAD + 5 * late(capacity) + counter, wanted, error, ticket)
        if shared:
            if g.up8 > 0:
                if up:
                    if C.parts > 1:
                        end = gl.minimum((part + 1) * most, g.k_up)
                        slot, phase = _copy_tokens(
                            x8, xs8, row, part * most, end, slot, phase, tokens, scales8, full, empty, NTS, C
                        )
                    else:
                        for _unit in range(C.passes):
                            slot, phase = _copy_tokens(
                                x8, xs8, row, 0, g.k_up, slot, phase, tokens, scales8, full, empty, NTS, C
                            )
                else:
                    slot, phase = _copy_tokens(
                        h8, hs8, row, 0, g.k_down8, slot, phase, tokens, scales8, full, empty, NTS, C
                    )
        else:
            if up:
                first, end = 0, STEPS[0]
                if C.parts > 1:
                    first, end = part * most, gl.minimum((part + 1) * most, STEPS[0])
                slot, phase = _copy_tokens(x4, xs4, row, first, end, slot, phase, tokens, scales4, full, empty, NT, C)
            else:
                slot, phase = _copy_tokens(h4, hs4, row, 0, STEPS[1], slot, phase, tokens, scales4, full, empty, NT, C)
        ticket, tslot, tphase = receive(tickets, tslot, tphase, 1)
