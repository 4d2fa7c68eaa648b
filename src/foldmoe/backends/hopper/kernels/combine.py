"""After the launch: weigh and add a token's parts in float32, in a fixed order, and round once."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foldmoe.backends.hopper.kernels.routes import row_limit, shared_range


@triton.jit(do_not_specialize=["valid_rows", "shared_begin", "shared_end", "routed_scale", "M"])
def combine(
    d,
    pos,
    weights,
    shared_weights,
    y,
    valid_rows,
    shared_rows,
    shared_begin,
    shared_end,
    routed_scale,
    M,
    K: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    VALID_TENSOR: tl.constexpr,
    SHARED_TENSOR: tl.constexpr,
    PDL: tl.constexpr,
):
    """y[m] = sum over k of w[m, k] * d[pos[m, k]], then the shared part; padding rows are zero.

    A part is skipped, not multiplied by zero, where there is none: neither its weight nor its row is read as a number.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    m = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    valid = row_limit(valid_rows, VALID_TENSOR, M)
    acc = tl.zeros([BLOCK], tl.float32)
    if m < valid:
        for k in tl.static_range(K):
            row = tl.load(pos + m * K + k)
            there = row >= 0
            weight = tl.load(weights + m * K + k, mask=there, other=0.0) * routed_scale
            part = tl.load(d + row.to(tl.int64) * H + column, mask=inside & there, other=0.0)
            acc = tl.where(there, acc + weight * part, acc)
        if HAS_SHARED:
            begin, end = shared_range(shared_rows, SHARED_TENSOR, shared_begin, shared_end, valid, HAS_SHARED)
            there = (m >= begin) & (m < end)
            part = tl.load(d + m.to(tl.int64) * H + column, mask=inside & there, other=0.0)
            if HAS_WEIGHTS:
                part *= tl.load(shared_weights + m, mask=there, other=0.0)
            acc = tl.where(there, acc + part, acc)
    tl.store(y + m.to(tl.int64) * H + column, acc.to(y.dtype.element_ty), mask=inside)
