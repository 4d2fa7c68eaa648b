"""Number formats inside kernels: stored codes to bf16 operands, and rounding to E4M3, all in plain integer arithmetic.

Nothing here needs FP8 hardware, so the same code runs on sm_80, Hopper, Blackwell and CDNA. Every stored number that is
a small code times a power of two is a bf16 number, and so is an E4M3 activation times its power-of-two scale: products
of such operands on bf16 tensor cores lose nothing before the float32 accumulator.

Triton's interpreter has no bf16 arithmetic; there an operand is a float32 that holds a bf16 number.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

# How a matrix is scaled, as in ``layout.py``; 0: not at all.
FOLDED_SCALE = tl.constexpr(1)  # power-of-two scales, multiplied into the bf16 weights
PARTIAL_SCALE = tl.constexpr(2)  # float32 scales, multiplied onto float32 partial sums


@triton.jit
def widen(v):
    """Bf16 (or any float) to float32."""
    if INTERPRETED and v.dtype == tl.bfloat16:
        return ((v.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF) << 16).to(tl.float32, bitcast=True)
    return v.to(tl.float32)


@triton.jit
def narrow(v):
    """Float32 to bf16, to nearest even."""
    if INTERPRETED:
        bits = v.to(tl.int32, bitcast=True)
        even = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        return tl.where(v == v, even, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return v.to(tl.bfloat16)


@triton.jit
def operand(v):
    """A loaded bf16 tile as an operand of ``tl.dot``."""
    if INTERPRETED:
        return widen(v)
    return v


@triton.jit
def from_bits(bits):
    """Int16 bit patterns of bf16 numbers to operands."""
    return operand(bits.to(tl.int16).to(tl.bfloat16, bitcast=True))


@triton.jit
def position(k, PLANES: tl.constexpr, BK: tl.constexpr):
    """Where column ``k`` of an activation lies: in every block of BK columns, plane p holds columns p, p + PLANES, ..

    A 16-bit word of weights holds PLANES neighbouring columns. Taking plane p of all words and plane p of the
    activations multiplies the right pairs without moving a weight between threads.
    """
    if PLANES == 1:
        return k
    return k // BK * BK + k % PLANES * (BK // PLANES) + k % BK // PLANES


@triton.jit
def plane(words, p: tl.constexpr, BITS: tl.constexpr):
    """Column p of every int16 word as bf16 bits, too small by 2 ** 126 (E2M1) or 2 ** 120 (E4M3); subnormals included.

    The code's exponent and mantissa bits move to the bottom of the exponent field: E2M1 0.5 becomes the bf16 subnormal
    2 ** -127, E4M3 2 ** -9 becomes 2 ** -129, and one multiplication by a power of two makes any of them right.
    """
    if BITS == 4:
        if p == 0:
            return ((words << 6) & 0x1C0) | ((words << 12) & -0x8000)
        elif p == 1:
            return ((words << 2) & 0x1C0) | ((words << 8) & -0x8000)
        elif p == 2:
            return ((words >> 2) & 0x1C0) | ((words << 4) & -0x8000)
        else:
            return ((words >> 6) & 0x1C0) | (words & -0x8000)
    else:
        if p == 0:
            return ((words << 4) & 0x7F0) | ((words << 8) & -0x8000)
        else:
            return ((words >> 4) & 0x7F0) | (words & -0x8000)


@triton.jit
def factor_bits(byte, BITS: tl.constexpr, WIDE: tl.constexpr):
    """E8M0 bytes to the bf16 bits of the factor that :func:`weight` multiplies by.

    The scale and the shift of :func:`plane` make one normal power of two unless a scale exceeds 2 (E2M1) or 128 (E4M3);
    WIDE keeps them apart. Byte 0 is 2 ** -127 either way.
    """
    code = byte.to(tl.int16)
    if WIDE:
        bits = tl.where(code == 0, 0x40, code << 7)
        return tl.where(code == 255, 0x7FC0, bits).to(tl.int16)
    else:
        SHIFT: tl.constexpr = 126 if BITS == 4 else 120
        return (code + SHIFT).to(tl.int16) << 7


@triton.jit
def weight(words, factor, p: tl.constexpr, BITS: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr):
    """Column p of every word as an operand: exact, scale included unless it is a float32 one."""
    UNIT: tl.constexpr = 2.0**126 if BITS == 4 else 2.0**120
    if BITS == 16:
        return operand(words)
    else:
        small = from_bits(plane(words, p, BITS))
        if SCALE == FOLDED_SCALE:
            if WIDE:
                return small * UNIT * factor
            else:
                return small * factor
        else:
            return small * UNIT


@triton.jit
def e4m3_scale(amax):
    """``2 ** ceil(log2(max(amax, 1e-4) / 448))`` and its inverse, from bits: no division to misround."""
    bits = tl.maximum(amax, 1e-4).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
    return (exponent << 23).to(tl.float32, bitcast=True), ((254 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(v, scale, inverse):
    """Float32 to the nearest (ties to even) E4M3 multiple of ``scale``, saturating at 448 * scale."""
    scaled = v * inverse
    magnitude = tl.abs(scaled)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # Adding 2**14 leaves steps of 2**-9, those of E4M3's subnormals; its bits are then a count of them.
    steps = (magnitude + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(magnitude < 0.015625, steps.to(tl.float32) * 0.001953125, normal)
    rounded = tl.where(rounded > 448.0, 448.0, rounded)
    return tl.where(scaled < 0, -rounded, rounded) * scale


@triton.jit
def amax_of(v, axis: tl.constexpr):
    """Largest magnitude along ``axis``, kept as a dimension; NaN where anything there is NaN or Inf."""
    magnitude = tl.abs(v)
    finite = magnitude <= 3.4028234663852886e38
    broken = tl.max((1 - finite.to(tl.int32)), axis, keep_dims=True)
    amax = tl.max(tl.where(finite, magnitude, 0.0), axis, keep_dims=True)
    return tl.where(broken > 0, float("nan"), amax)


@triton.jit
def quantize(v, amax):
    """Float32 to E4M3 times a power-of-two scale for ``amax``; NaN throughout where ``amax`` is NaN."""
    scale, inverse = e4m3_scale(tl.where(amax == amax, amax, 1.0))
    return tl.where(amax == amax, round_e4m3(v, scale, inverse), float("nan"))
