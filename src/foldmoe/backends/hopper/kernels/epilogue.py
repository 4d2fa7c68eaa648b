"""What follows a product: SwiGLU, quantisation and the store of hidden vectors; the store of down products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

# A name that changed between Triton 3.6 and 3.9.
barrier = getattr(gl, "thread_barrier", None) or gl.barrier

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
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
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


@gluon.jit
def for_copies(block):
    """Orders this thread's stores before later bulk copies of what they wrote."""
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [block], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def count_stored(done, counter):
    """This warpgroup's part of a hidden block is in memory."""
    barrier()
    gl.atomic_add(done + counter, 1, sem="release", scope="gpu")


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
    amax = gl.max(gl.abs(parts[0]), axis=0)
    if C.units == 2:
        amax = gl.maximum(amax, gl.max(gl.abs(parts[1]), axis=0))
    amax_bufs.index(half * WGS + WG).slice(0, NT).store(amax)
    barrier()
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
    store_hidden((parts[0] * inverse.expand_dims(0)).to(gl.float8e4nv), h, row, rows, column, C)
    if C.units == 2:
        store_hidden((parts[1] * inverse.expand_dims(0)).to(gl.float8e4nv), h, row, rows, column + 64, C)
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
    token = gl.arange(0, acc.shape[1], gl.SliceLayout(0, mma)).expand_dims(0)
    column = first + gl.arange(0, 64, gl.SliceLayout(1, mma)).expand_dims(1)
    at = d + (row + token).to(gl.int64) * C.geometry.hidden + column
    gl.store(at, acc, mask=(token < rows) & (column < C.geometry.hidden))


@gluon.jit
def prefetch(references):
    """A block's 256 reference exponents on their way to L2 before its K loop: they lie in DRAM, a microsecond away."""
    at = references + 2 * gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
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
