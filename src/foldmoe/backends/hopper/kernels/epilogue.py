"""What follows a product: SwiGLU, quantisation and the store of hidden vectors; the store of down products."""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from foldmoe.backends.hopper.kernels.tickets import late

# A name that changed between Triton 3.6 and 3.9.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier

# A clamp in one instruction that lets NaN pass. Comparisons take more registers: FP8 tiles of 128 tokens spilled.
_NAN_PASSES = gl.constexpr(tl.PropagateNan.ALL)

# x * sigmoid(x) from approximate exp2 and reciprocal: within 1e-6 of the exact value in five instructions, not twenty.
_SILU = gl.constexpr("""{
.reg .f32 e;
mul.f32 e, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 e, e;
add.f32 e, e, 0f3F800000;
rcp.approx.ftz.f32 e, e;
mul.f32 $0, $1, e;
}""")


@gluon.jit
def swiglu(acc, LIMIT: gl.constexpr):
    """Rows 0..7 of every 16 are gate, 8..15 up: both in one thread. NaN passes the clamp."""
    NT: gl.constexpr = acc.shape[1]
    gate, up = acc.reshape([4, 2, 8, NT]).permute((0, 2, 3, 1)).split()
    if float("inf") > LIMIT:
        gate = gl.minimum(gate, LIMIT, propagate_nan=_NAN_PASSES)
        up = gl.maximum(gl.minimum(up, LIMIT, propagate_nan=_NAN_PASSES), -LIMIT, propagate_nan=_NAN_PASSES)
    gate = gl.inline_asm_elementwise(_SILU, "=f,f", [gate], dtype=gl.float32, is_pure=True, pack=1)
    return (gate * up).reshape([32, NT])


@gluon.jit
def store_hidden(values, h, row, rows, column, C: gl.constexpr):
    """32 features of a block from ``column`` on, as they are stored."""
    HL: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, 4], [0, 1])
    values = gl.convert_layout(values, HL)
    token = gl.arange(0, values.shape[1], gl.SliceLayout(0, HL))
    feature = gl.arange(0, 32, gl.SliceLayout(1, HL))
    at = h + (row + token).to(gl.int64).expand_dims(0) * C.geometry.h_stride + (column + feature).expand_dims(1)
    gl.store(at, values, mask=(token < rows).expand_dims(0))


@gluon.constexpr_function
def _staging(tokens):
    """How two times 32 features x 32 or 64 tokens change threads in shared memory, and as which threads load them.

    A word is four tokens of one feature, as a product's thread writes them; 16 bytes of a thread follow 16 of another,
    and are four features' words. So a thread has two addresses, where the swizzle of ``gl.convert_layout`` needs ten
    and the compiler holds them all over every K loop.
    """
    if tokens == 64:
        four, threads, more = [[0, 16], [0, 32]], [[0, 2], [0, 4], [8, 0], [16, 0], [0, 1], [0, 8], [32, 0]], [[4, 0]]
    else:
        four, threads, more = [[0, 8], [0, 16]], [[0, 2], [0, 4], [4, 0], [8, 0], [16, 0], [0, 1], [32, 0]], []
    features = [[1, 0], [2, 0]]
    loaded = gl.DistributedLinearLayout(features + more + four, threads[:5], threads[5:], [], [64, tokens])
    return gl.SharedLinearLayout(four + features + threads + more), loaded


@gluon.constexpr_function
def _accumulated(tokens):
    """32 features of a product, as ``swiglu`` leaves them."""
    along = [[0, 1], *([0, 1 << i] for i in range(3, tokens.bit_length() - 1))]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(along, lanes, [[8, 0], [16, 0]], [], [32, tokens])


@gluon.jit
def _along(count: gl.constexpr, axis: gl.constexpr, layout: gl.constexpr):
    """0 .. count - 1 along axis 2 or 3 of five."""
    OTHER: gl.constexpr = 5 - axis
    only: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(OTHER, gl.SliceLayout(4, layout))))
    return gl.arange(0, count, only).expand_dims(0).expand_dims(1).expand_dims(OTHER).expand_dims(4)


@gluon.jit
def store_hidden_pair(values, more, h, row, rows, column, DT: gl.constexpr, DC: gl.constexpr, C: gl.constexpr):
    """Store 32 features of 32 or 64 tokens; and ``more``, as many, of DT tokens and DC columns further on."""
    NT: gl.constexpr = values.shape[1]
    SHARED: gl.constexpr = _staging(NT)[0]
    staged = gl.allocate_shared_memory(gl.float8e4nv, [1, 64, NT], SHARED).index(late(0))
    staged.slice(0, 32).store(gl.convert_layout(values, _accumulated(NT), assert_trivial=True))
    staged.slice(32, 32).store(gl.convert_layout(more, _accumulated(NT), assert_trivial=True))
    EACH: gl.constexpr = NT // 8  # features a thread
    both = staged.load(_staging(NT)[1]).reshape([2, 32 // EACH, EACH, 4, NT // 4])
    HL: gl.constexpr = both.type.layout
    # From an unknown number of the thread, not from indices: nothing made of it is held over a K loop.
    thread = late(gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])))
    thread = thread.reshape([2, NT // 32, 2, 32 // EACH, 4]).permute((0, 3, 1, 4, 2))
    thread = gl.convert_layout(thread.reshape([2, 32 // EACH, 1, 1, NT // 4]), HL, assert_trivial=True)
    further = thread >> 6
    if NT == 64:
        feature = (thread >> 2 & 3) * 8
        token = (thread >> 2 & 8) + (thread & 3) * 2 + (thread >> 4 & 1)
    else:
        feature = (thread >> 2 & 7) * 4
        token = (thread & 3) * 2 + (thread >> 5 & 1)
    feature += _along(EACH, 2, HL)
    token += _along(4, 3, HL) * (NT // 4) + further * DT
    at = h + (row + token).to(gl.int64) * C.geometry.h_stride + (column + further * DC + feature)
    gl.store(at, both, mask=token < rows)


@gluon.jit
def _store_halves(values, h, row, rows, column, C: gl.constexpr):
    """Store 32 features of 64 or 128 tokens."""
    HALF: gl.constexpr = values.shape[1] // 2
    left, right = values.reshape([32, 2, HALF]).permute((0, 2, 1)).split()
    store_hidden_pair(left, right, h, row, rows, column, HALF, 0, C)


@gluon.jit
def for_copies(block):
    """Orders this thread's stores before later bulk copies of what they wrote."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_stored(done, counter):
    """What this warpgroup stored, its part of a hidden block or of a cut tile's products, is in memory."""
    barrier()
    gl.atomic_add(done + counter, 1, sem="release", scope="gpu")


@gluon.constexpr_function
def _by_token(tokens):
    """A thread a token, with all four rows of it; where there are fewer tokens than threads, more of them the same."""
    bits = [[0, 1 << i] if 1 << i < tokens else [0, 0] for i in range(7)]
    return gl.DistributedLinearLayout([[1, 0], [2, 0]], bits[:5], bits[5:], [], [4, tokens])


@gluon.jit
def _amax(parts):
    """A warpgroup's largest value of every token.

    Not ``gl.max`` over all features: between warps it takes another round through shared memory, and a register over
    every K loop (with few tokens not all threads read there, and what the others hold is live for ever).
    """
    NT: gl.constexpr = parts[0].shape[1]
    warps = gl.max(gl.abs(parts[0]).reshape([4, 8, NT]), axis=1)
    if len(parts) == 2:
        warps = gl.maximum(warps, gl.max(gl.abs(parts[1]).reshape([4, 8, NT]), axis=1))
    told = gl.allocate_shared_memory(gl.float32, [1, 4, NT], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(late(0))
    told.store(warps)
    return gl.max(told.load(_by_token(NT)), axis=0)


@gluon.jit
def finish_up(parts, out, at, exchange, LAST: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """Quantise one 128-column block of the hidden vector (all warpgroups' parts share a scale) and store it.

    Args:
        parts: this warpgroup's, 32 columns each.
        at: first row, rows left, block of columns, the token tile's counter.
        exchange: how many blocks came before this one, and where warpgroups tell each other their largest values.
        LAST: of the tile's groups of tokens: count the block as stored.

    Returns:
        How many blocks came before the next one.
    """
    row, rows, block, counter = at
    turn, amax_bufs, amax_full = exchange
    h, hs, done, row_capacity, _d = out
    WGS: gl.constexpr = C.warpgroups
    NT: gl.constexpr = parts[0].shape[1]
    half = turn & 1
    amax_bufs.index(half * WGS + WG).slice(0, NT).store(_amax(parts))
    barrier()
    mbarrier.arrive(amax_full, count=1)
    mbarrier.wait(amax_full, half)
    TOKENS: gl.constexpr = gl.SliceLayout(0, parts[0].type.layout)
    amax = amax_bufs.index(half * WGS).slice(0, NT).load(TOKENS)
    for other in gl.static_range(1, WGS):
        amax = gl.maximum(amax, amax_bufs.index(half * WGS + other).slice(0, NT).load(TOKENS))
    amax = gl.maximum(amax, 1e-4)
    bits = amax.to(gl.int32, bitcast=True)
    power = (bits >> 23) - 127 - 8 + gl.where((bits & 0x7FFFFF) > 0x600000, 1, 0)  # ceil(log2(amax / 448))
    scale = ((power + 127) << 23).to(gl.float32, bitcast=True)
    inverse = ((127 - power) << 23).to(gl.float32, bitcast=True)
    column = block * 128 + WG * 32
    values = (parts[0] * inverse.expand_dims(0)).to(gl.float8e4nv)
    if C.units == 2:
        more = (parts[1] * inverse.expand_dims(0)).to(gl.float8e4nv)
        if NT == 128:
            _store_halves(values, h, row, rows, column, C)
            _store_halves(more, h, row, rows, column + 64, C)
        elif NT >= 32:
            store_hidden_pair(values, more, h, row, rows, column, 0, 64, C)
        else:
            store_hidden(values, h, row, rows, column, C)
            store_hidden(more, h, row, rows, column + 64, C)
    elif NT == 64:
        _store_halves(values, h, row, rows, column, C)
    else:
        store_hidden(values, h, row, rows, column, C)
    if WG == 0:
        token = gl.arange(0, NT, scale.type.layout)
        gl.store(hs + block.to(gl.int64) * row_capacity + row + token, scale, mask=token < rows)
    for_copies(block)
    if LAST:
        count_stored(done, counter)
    return turn + 1


@gluon.jit
def finish_down(acc, out, row, rows, first, C: gl.constexpr):
    _h, _hs, _done, _row_capacity, d = out
    mma: gl.constexpr = acc.type.layout
    token = late(gl.arange(0, acc.shape[1], gl.SliceLayout(0, mma))).expand_dims(0)
    column = first + gl.arange(0, 64, gl.SliceLayout(1, mma)).expand_dims(1)
    at = d + (row + token).to(gl.int64) * C.geometry.hidden + column
    gl.store(at, acc, mask=(token < rows) & (column < C.geometry.hidden))


@gluon.jit
def prefetch(references):
    """A block's 256 reference exponents on their way to L2 before its K loop: they lie in DRAM, a microsecond away."""
    at = references + 2 * late(gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])))
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _scaled(acc, scales, unit_row, first, rows, BY_ROW: gl.constexpr, BY_TOKEN: gl.constexpr):
    """BY_ROW: times each row's reference exponent (a power of two). BY_TOKEN: times each token's scale."""
    by_row, by_token = scales
    if BY_ROW:
        row = gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
        acc = acc * gl.load(by_row + unit_row + row).expand_dims(1)
    if BY_TOKEN:
        token = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
        acc = acc * gl.load(by_token + first + token, mask=token < rows, other=0.0).expand_dims(0)
    return acc


@gluon.jit
def finish_up_tile(
    sums,
    scales,
    out,
    at,
    exchange,
    LIMIT: gl.constexpr,
    BY_ROW: gl.constexpr,
    BY_TOKEN: gl.constexpr,
    WG: gl.constexpr,
    C: gl.constexpr,
):
    """An up tile's sums, unit after unit of each group of tokens, to hidden vectors.

    Args:
        scales: this warpgroup's first row's and the tokens', see ``_scaled``; read where BY_ROW and BY_TOKEN say so.
        at, exchange: see ``finish_up``, as is what comes back.
    """
    first, rows, column, counter = at
    turn, amax, amax_full = exchange
    UNITS: gl.constexpr = C.units
    GROUPS: gl.constexpr = len(sums) // UNITS
    for i in gl.static_range(GROUPS):
        hidden = swiglu(_scaled(sums[i * UNITS], scales, 0, first, rows, BY_ROW, BY_TOKEN), LIMIT)
        if UNITS == 1:
            parts = (hidden,)
        else:
            other = _scaled(sums[2 * i + 1], scales, C.warpgroups * 64, first, rows, BY_ROW, BY_TOKEN)
            parts = (hidden, swiglu(other, LIMIT))
        here = (first, rows, column, counter)
        turn = finish_up(parts, out, here, (turn, amax, amax_full), i == GROUPS - 1, WG, C)
        first += hidden.shape[1]
        rows -= hidden.shape[1]
    return turn


@gluon.jit
def finish_down_tile(sums, scales, out, first, rows, column, BY_ROW: gl.constexpr, WG: gl.constexpr, C: gl.constexpr):
    """A down tile's sums, likewise, to down products."""
    UNITS: gl.constexpr = C.units
    for i in gl.static_range(len(sums) // UNITS):
        for unit in gl.static_range(UNITS):
            acc = _scaled(sums[i * UNITS + unit], scales, unit * C.warpgroups * 64, first, rows, BY_ROW, False)
            finish_down(acc, out, first, rows, column * 256 + (unit * C.warpgroups + WG) * 64, C)
        first += sums[i * UNITS].shape[1]
        rows -= sums[i * UNITS].shape[1]
