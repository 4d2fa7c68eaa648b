# fmt: off
# ruff: noqa: SIM102, SIM108
"""The two grouped GEMMs. Weights are the M side of every product, tokens its N side.

An accumulator is ``[BN weight rows, BM tokens]``: few tokens make a narrow tile, and on Hopper the upcast weights go
into ``wgmma`` from registers. A grid holds all shared tiles first (theirs are the most bytes), then all routed tiles;
either part may be missing. K is walked in steps of BK columns in the same order whatever BM is, so the bits of a token
do not depend on the batch it is in.

Routed rows are places in the sorted route list; ``tiles``, ``order`` and ``facts`` are described in ``routing.py``.
Weights are the stored bytes: 16-bit words of 4 E2M1 codes, 2 E4M3 values or 1 bf16 value along K, in any row stride.
Activations are bf16 in the column order of :func:`foldmoe.backends.triton.kernels.numbers.position`.

Per set of experts (``r_`` routed, ``s_`` shared) a kernel takes
    x, w, s, out      activations, weight words, scales, output
    x_stride, w_expert, w_row, s_expert, s_row, s_col, out_stride      strides in elements
    BITS, PLANES      16/PLANES bits a column; columns a word
    BK                columns a step
    SCALE, WIDE       see ``numbers.py``
    SN, SK            rows and columns that share a scale
    TAIL              K is no multiple of BK
"""

import triton
import triton.language as tl

from foldmoe.backends.triton.kernels.numbers import (
    FOLDED_SCALE,
    PARTIAL_SCALE,
    amax_of,
    factor_bits,
    from_bits,
    narrow,
    operand,
    position,
    quantize,
    weight,
)


@triton.jit
def _load_words(w, rows, k0, K, PLANES: tl.constexpr, BK: tl.constexpr, TAIL: tl.constexpr):
    """``[BN, BK / PLANES]`` words of one step."""
    KW: tl.constexpr = BK // PLANES
    j = k0 // PLANES + tl.arange(0, KW)
    at = w + rows[:, None] + j[None, :]
    if TAIL:
        return tl.load(at, mask=j[None, :] < K // PLANES, other=0)
    return tl.load(at)


@triton.jit
def _load_factor(
    s, rows, s_col, k0, K, BITS: tl.constexpr, PLANES: tl.constexpr, BK: tl.constexpr, WIDE: tl.constexpr,
    SK: tl.constexpr, TAIL: tl.constexpr, BN: tl.constexpr,
):
    """Factors of one step's words, ``[BN, 1]`` where the step lies in one scale block, else ``[BN, BK / PLANES]``."""
    if SK >= BK:
        return from_bits(factor_bits(tl.load(s + rows + k0 // SK * s_col), BITS, WIDE))[:, None]
    else:
        G: tl.constexpr = BK // SK
        KW: tl.constexpr = BK // PLANES
        g = k0 // SK + tl.arange(0, G)
        at = s + rows[:, None] + g[None, :] * s_col
        if TAIL:
            code = tl.load(at, mask=g[None, :] * SK < K, other=127)
        else:
            code = tl.load(at)
        few = from_bits(factor_bits(code, BITS, WIDE))
        return tl.reshape(tl.broadcast_to(few[:, :, None], [BN, G, KW // G]), [BN, KW])


@triton.jit
def _step(
    total, x_at, words, factor, scale, k0, K, BITS: tl.constexpr, PLANES: tl.constexpr, BK: tl.constexpr,
    SCALE: tl.constexpr, WIDE: tl.constexpr, TAIL: tl.constexpr,
):
    """One step's products onto ``total``. Upcast weights begin at zero: a sum that went on in the registers of the step
    before would make ptxas serialise wgmma, whose operand comes out of registers too (C7515).
    """
    KW: tl.constexpr = BK // PLANES
    part = total
    if SCALE != 0:
        part = tl.zeros_like(total)
    for p in tl.static_range(PLANES):
        if TAIL:
            there = (k0 // PLANES + tl.arange(0, KW) < K // PLANES)[:, None]
            xs = operand(tl.load(x_at + p * KW, mask=there, other=0.0))
        else:
            xs = operand(tl.load(x_at + p * KW))
        part = tl.dot(weight(words, factor, p, BITS, SCALE, WIDE), xs, part)
    if SCALE == PARTIAL_SCALE:
        return total + part * scale
    elif SCALE == FOLDED_SCALE:
        return total + part
    else:
        return part


@triton.jit
def _accumulate(
    x, x_rows, w, s, s_col, w_rows, s_rows, w_rows2, s_rows2, K, PAIR: tl.constexpr, BITS: tl.constexpr,
    PLANES: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, SK: tl.constexpr,
    TAIL: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):
    """W x^T for one or two sets of rows of the same matrix.

    Args:
        x_rows: ``[BM]`` int64 element offsets of the tokens' rows. w_rows, s_rows (2): ``[BN]`` int32 offsets of the
            matrix rows and their scales.

    Returns:
        ``[BN, BM]`` float32, twice.
    """
    KW: tl.constexpr = BK // PLANES
    j = tl.arange(0, KW)
    first = tl.zeros([BN, BM], tl.float32)
    second = tl.zeros([BN, BM], tl.float32)
    x_at = x + x_rows[None, :] + j[:, None]
    for k0 in range(0, K, BK):
        words = _load_words(w, w_rows, k0, K, PLANES, BK, TAIL)
        if PAIR:
            words2 = _load_words(w, w_rows2, k0, K, PLANES, BK, TAIL)
        factor = 0
        factor2 = 0
        if SCALE == FOLDED_SCALE:
            factor = _load_factor(s, s_rows, s_col, k0, K, BITS, PLANES, BK, WIDE, SK, TAIL, BN)
            if PAIR:
                factor2 = _load_factor(s, s_rows2, s_col, k0, K, BITS, PLANES, BK, WIDE, SK, TAIL, BN)
        scale = 1.0
        scale2 = 1.0
        if SCALE == PARTIAL_SCALE:
            scale = tl.load(s + s_rows + k0 // SK * s_col).to(tl.float32)[:, None]
            if PAIR:
                scale2 = tl.load(s + s_rows2 + k0 // SK * s_col).to(tl.float32)[:, None]
        first = _step(first, x_at + k0, words, factor, scale, k0, K, BITS, PLANES, BK, SCALE, WIDE, TAIL)
        if PAIR:
            second = _step(second, x_at + k0, words2, factor2, scale2, k0, K, BITS, PLANES, BK, SCALE, WIDE, TAIL)
    return first, second


@triton.jit
def _up_tile(
    x, x_rows, w, s, w_row, s_row, s_col, out, out_rows, out_stride, live, block, K, width, limit,
    OUT_PLANES: tl.constexpr, OUT_BK: tl.constexpr, LIMIT: tl.constexpr, ROUND: tl.constexpr, BITS: tl.constexpr,
    PLANES: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, SN: tl.constexpr,
    SK: tl.constexpr, TAIL: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):
    """BN columns of the hidden activations of BM tokens: gate and up rows, SwiGLU, rounding. Offsets of what it stores
    are made of row numbers afterwards: held over the products they would spill.
    """
    n = block * BN + tl.arange(0, BN)
    gate_row = tl.minimum(n, width - 1)  # rows beyond the matrix repeat its last one and are not stored
    up_row = gate_row + width
    gate, up = _accumulate(
        x, x_rows, w, s, s_col, gate_row * w_row, gate_row // SN * s_row, up_row * w_row, up_row // SN * s_row, K,
        True, BITS, PLANES, BK, SCALE, WIDE, SK, TAIL, BN, BM,
    )
    if LIMIT:  # comparisons, not minimum: NaN must stay NaN
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    hidden = gate / (1.0 + tl.exp(-gate)) * up
    used = (n < width)[:, None]
    if ROUND:
        tl.static_assert(BN == 128, "a tile is one quantisation group")
        hidden = quantize(hidden, amax_of(tl.where(used, hidden, 0.0), 0))
    mask = used & live[None, :]
    at = out + out_rows.to(tl.int64)[None, :] * out_stride + position(n, OUT_PLANES, OUT_BK)[:, None]
    tl.store(at, narrow(hidden), mask=mask)


@triton.jit
def _down_tile(
    x, x_rows, w, s, w_row, s_row, s_col, out, out_rows, live, block, K, hidden, BITS: tl.constexpr,
    PLANES: tl.constexpr, BK: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, SN: tl.constexpr,
    SK: tl.constexpr, TAIL: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):
    """BN columns of the output of BM routes, unweighted float32."""
    n = block * BN + tl.arange(0, BN)
    row = tl.minimum(n, hidden - 1)
    result, _unused = _accumulate(
        x, x_rows, w, s, s_col, row * w_row, row // SN * s_row, row, row, K, False, BITS, PLANES, BK, SCALE, WIDE,
        SK, TAIL, BN, BM,
    )
    tl.store(out + out_rows[None, :] + n[:, None], result, mask=(n < hidden)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["capacity", "top_k", "shared_programs", "r_limit", "s_limit"])
def up(
    facts, tiles, order, capacity, top_k, hidden, shared_programs, r_x, r_x_stride, r_w, r_w_expert, r_w_row, r_s,
    r_s_expert, r_s_row, r_s_col, r_out, r_out_stride, r_width, r_limit, s_x, s_x_stride, s_w, s_w_row, s_s,
    s_s_row, s_s_col, s_out, s_out_stride, s_width, s_limit, ROUTED: tl.constexpr, SHARED: tl.constexpr,
    ROUND: tl.constexpr, BN: tl.constexpr, R_BITS: tl.constexpr, R_PLANES: tl.constexpr, R_BK: tl.constexpr,
    R_SCALE: tl.constexpr, R_WIDE: tl.constexpr, R_SN: tl.constexpr, R_SK: tl.constexpr, R_TAIL: tl.constexpr,
    R_BM: tl.constexpr, R_OUT_PLANES: tl.constexpr, R_OUT_BK: tl.constexpr, R_LIMIT: tl.constexpr,
    S_BITS: tl.constexpr, S_PLANES: tl.constexpr, S_BK: tl.constexpr, S_SCALE: tl.constexpr, S_WIDE: tl.constexpr,
    S_SN: tl.constexpr, S_SK: tl.constexpr, S_TAIL: tl.constexpr, S_BM: tl.constexpr, S_OUT_PLANES: tl.constexpr,
    S_OUT_BK: tl.constexpr, S_LIMIT: tl.constexpr,
):
    """Gate and up projections. Grid: shared token tiles x ceil(s_width / BN) + capacity x ceil(r_width / BN).

    x ``[tokens, x_stride]`` bf16; out: routed ``[routes, out_stride]``, shared ``[tokens, out_stride]``, bf16.
    """
    pid = tl.program_id(0)
    if SHARED:
        if pid < shared_programs:
            blocks = tl.cdiv(s_width, BN)
            first, last = tl.load(facts + 1), tl.load(facts + 2)
            row = pid // blocks * S_BM + tl.arange(0, S_BM)
            if (first < last) & (pid // blocks * S_BM < last) & (pid // blocks * S_BM + S_BM > first):
                live = (row >= first) & (row < last)
                token = tl.where(live, row, first)
                _up_tile(
                    s_x, token.to(tl.int64) * s_x_stride, s_w, s_s, s_w_row, s_s_row, s_s_col, s_out, token,
                    s_out_stride, live, pid % blocks, hidden, s_width, s_limit, S_OUT_PLANES, S_OUT_BK, S_LIMIT,
                    ROUND, S_BITS, S_PLANES, S_BK, S_SCALE, S_WIDE, S_SN, S_SK, S_TAIL, BN, S_BM,
                )
    if ROUTED:
        if pid >= shared_programs:
            blocks = tl.cdiv(r_width, BN)
            tile = (pid - shared_programs) // blocks
            if tile < tl.load(facts + 3):
                expert = tl.load(tiles + tile).to(tl.int64)
                first, last = tl.load(tiles + capacity + tile), tl.load(tiles + 2 * capacity + tile)
                place = first + tl.arange(0, R_BM)
                live = place < last
                place = tl.where(live, place, first)
                source = (tl.load(order + place) // top_k).to(tl.int64)
                _up_tile(
                    r_x, source * r_x_stride, r_w + expert * r_w_expert, r_s + expert * r_s_expert, r_w_row,
                    r_s_row, r_s_col, r_out, place, r_out_stride, live,
                    (pid - shared_programs) % blocks, hidden, r_width, r_limit, R_OUT_PLANES, R_OUT_BK, R_LIMIT,
                    ROUND, R_BITS, R_PLANES, R_BK, R_SCALE, R_WIDE, R_SN, R_SK, R_TAIL, BN, R_BM,
                )


@triton.jit(do_not_specialize=["tokens", "capacity", "top_k", "shared_programs"])
def down(
    facts, tiles, order, slots, tokens, capacity, top_k, hidden, shared_programs, r_x, r_x_stride, r_w, r_w_expert,
    r_w_row, r_s, r_s_expert, r_s_row, r_s_col, r_width, s_x, s_x_stride, s_w, s_w_row, s_s, s_s_row, s_s_col,
    s_width, ROUTED: tl.constexpr, SHARED: tl.constexpr, BN: tl.constexpr, R_BITS: tl.constexpr,
    R_PLANES: tl.constexpr, R_BK: tl.constexpr, R_SCALE: tl.constexpr, R_WIDE: tl.constexpr, R_SN: tl.constexpr,
    R_SK: tl.constexpr, R_TAIL: tl.constexpr, R_BM: tl.constexpr, S_BITS: tl.constexpr, S_PLANES: tl.constexpr,
    S_BK: tl.constexpr, S_SCALE: tl.constexpr, S_WIDE: tl.constexpr, S_SN: tl.constexpr, S_SK: tl.constexpr,
    S_TAIL: tl.constexpr, S_BM: tl.constexpr,
):
    """Down projections. Grid: (shared token tiles + capacity) x ceil(hidden / BN).

    x: hidden activations as :func:`up` wrote them; slots: ``[tokens * top_k + tokens, hidden]`` float32.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(hidden, BN)
    if SHARED:
        if pid < shared_programs:
            first, last = tl.load(facts + 1), tl.load(facts + 2)
            row = pid // blocks * S_BM + tl.arange(0, S_BM)
            if (first < last) & (pid // blocks * S_BM < last) & (pid // blocks * S_BM + S_BM > first):
                live = (row >= first) & (row < last)
                token = tl.where(live, row, first).to(tl.int64)
                slot = tokens.to(tl.int64) * top_k + token
                _down_tile(
                    s_x, token * s_x_stride, s_w, s_s, s_w_row, s_s_row, s_s_col, slots, slot * hidden, live,
                    pid % blocks, s_width, hidden, S_BITS, S_PLANES, S_BK, S_SCALE, S_WIDE, S_SN, S_SK, S_TAIL, BN,
                    S_BM,
                )
    if ROUTED:
        if pid >= shared_programs:
            tile = (pid - shared_programs) // blocks
            if tile < tl.load(facts + 3):
                expert = tl.load(tiles + tile).to(tl.int64)
                first, last = tl.load(tiles + capacity + tile), tl.load(tiles + 2 * capacity + tile)
                place = first + tl.arange(0, R_BM)
                live = place < last
                place = tl.where(live, place, first)
                route = tl.load(order + place).to(tl.int64)
                _down_tile(
                    r_x, place.to(tl.int64) * r_x_stride, r_w + expert * r_w_expert, r_s + expert * r_s_expert,
                    r_w_row, r_s_row, r_s_col, slots, route * hidden, live, (pid - shared_programs) % blocks,
                    r_width, hidden, R_BITS, R_PLANES, R_BK, R_SCALE, R_WIDE, R_SN, R_SK, R_TAIL, BN, R_BM,
                )
