# mypy: ignore-errors
"""Routed outputs weighted and added, and the shared part with them, in one launch.

Released engines take two launches for this; peers that leave the sum to the engine get one here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit(do_not_specialize=["hidden", "top_k"])
def weighted_sum_kernel(routed, weights, shared, y, hidden, top_k, COLUMNS: tl.constexpr):
    """Grid: tokens x ceil(hidden / COLUMNS). routed ``[M * K, H]``, weights ``[M, K]``, shared and y ``[M, H]``."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.load(shared + row * hidden + n, mask=n < hidden, other=0.0).to(tl.float32)
    for k in range(top_k):
        part = tl.load(routed + (row * top_k + k) * hidden + n, mask=n < hidden, other=0.0)
        total += part.to(tl.float32) * tl.load(weights + row * top_k + k)
    tl.store(y + row * hidden + n, total.to(y.dtype.element_ty), mask=n < hidden)


def weighted_sum(routed: Tensor, weights: Tensor, shared: Tensor) -> Tensor:
    """``y[m] = shared[m] + sum_k weights[m, k] * routed[m * K + k]``, in float32, rounded once.

    Args:
        routed: ``[M * K, H]``, contiguous.
        weights: ``[M, K]`` float32.
        shared: ``[M, H]``, contiguous.

    Returns:
        ``[M, H]`` in shared's dtype.
    """
    tokens, hidden = shared.shape
    y = torch.empty_like(shared)
    grid = (tokens, triton.cdiv(hidden, _COLUMNS))
    weighted_sum_kernel[grid](routed, weights, shared, y, hidden, weights.shape[1], COLUMNS=_COLUMNS)
    return y
