# fmt: off
# ruff: noqa: SIM102 (a branch on a constexpr stays apart from one that the device takes)
"""The last launch: every token's routed outputs, weighted and added in the order of k, then the shared part."""

import triton
import triton.language as tl

from foldmoe.backends.triton.kernels.numbers import narrow


@triton.jit(
    do_not_specialize=["tokens", "top_k", "experts", "routed_scale"],
    do_not_specialize_on_alignment=["ids", "weights", "shared_weights"],
)
def combine(
    slots, ids, weights, shared_weights, facts, y, tokens, hidden, top_k, experts, routed_scale,
    ROUTED: tl.constexpr, SHARED: tl.constexpr, SHARED_WEIGHTS: tl.constexpr, COLUMNS: tl.constexpr,
):
    """Grid: tokens x ceil(hidden / COLUMNS).

    slots: ``[tokens * top_k + tokens, hidden]`` float32, routes first. A slot of no route was never written and is not
    read. Float32 throughout; one rounding, to y's dtype.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([COLUMNS], tl.float32)
    valid = tl.load(facts)
    if row < valid:
        if ROUTED:
            for k in range(top_k):
                route = row * top_k + k
                expert = tl.load(ids + route)
                if (expert >= 0) & (expert < experts):
                    part = tl.load(slots + route * hidden + n, mask=n < hidden, other=0.0)
                    total += part * tl.load(weights + route)
            total = total * routed_scale
        if SHARED:
            if (row >= tl.load(facts + 1)) & (row < tl.load(facts + 2)):
                slot = tokens.to(tl.int64) * top_k + row
                part = tl.load(slots + slot * hidden + n, mask=n < hidden, other=0.0)
                if SHARED_WEIGHTS:
                    part = part * tl.load(shared_weights + row)
                total += part
    if y.dtype.element_ty == tl.bfloat16:
        tl.store(y + row * hidden + n, narrow(total), mask=n < hidden)
    else:
        tl.store(y + row * hidden + n, total.to(y.dtype.element_ty), mask=n < hidden)
