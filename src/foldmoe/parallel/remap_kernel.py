# mypy: ignore-errors
"""Routed ids to slots and the shared route appended, in one launch.

One element of the output ``[M, K + 1]`` a lane, so that any K works, a power of two or not.
"""

import triton
import triton.language as tl

BLOCK = 256
"""Elements of the output a program."""


@triton.jit(do_not_specialize=["total", "top_k", "ranks", "experts", "shared_slot"])
def remap_kernel(
    ids, weights, shared_weights, ends, out_ids, out_weights, strays,
    total, top_k, ranks, experts, shared_slot,
    GATED: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: ceil(total / BLOCK), total = M * (K + 1). RANKS: ranks rounded up to a power of two.

    ids ``[M, K]`` int32 or int64 physical experts; weights ``[M, K]``, shared_weights ``[M]`` (where GATED) float32;
    ends ``[ranks]`` int64, one past each rank's last expert. An id that is neither an expert nor -1 becomes -1 and is
    counted in strays.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = i // (top_k + 1)
    k = i - row * (top_k + 1)
    live = i < total
    routed = live & (k < top_k)
    expert = tl.load(ids + row * top_k + k, mask=routed, other=-1)
    known = (expert >= 0) & (expert < experts)
    r = tl.arange(0, RANKS)
    end = tl.load(ends + r, mask=r < ranks, other=0)
    holder = tl.sum(((end[None, :] <= expert[:, None]) & (r[None, :] < ranks)).to(tl.int32), 1)
    slot = tl.where(k == top_k, shared_slot, tl.where(known, expert + holder, -1))
    tl.store(out_ids + i, slot.to(out_ids.dtype.element_ty), mask=live)
    weight = tl.load(weights + row * top_k + k, mask=routed, other=1.0)
    if GATED:
        weight = tl.where(k == top_k, tl.load(shared_weights + row, mask=live, other=0.0), weight)
    tl.store(out_weights + i, weight, mask=live)
    wrong = tl.sum((routed & (expert != -1) & (known == 0)).to(tl.int32), 0)
    if wrong > 0:
        tl.atomic_add(strays, wrong.to(tl.int64))
