"""Other ranks' tokens: dispatch, combine, and the rows whose shared part is this rank's to add.

Only data parallelism needs it. Ranks that share all their tokens (tensor parallelism, with or without expert
parallelism) each add their part, and vLLM's one all-reduce sums them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def dispatch(x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, tuple[int, int]]:
    """All data-parallel ranks' x ``[N, H]``, weights and ids ``[N, K]``, and (start, end) of this rank's own rows.

    The router has run before, on this rank's tokens alone: layers that route by token id need no other rank's ids.
    """
    from vllm.distributed import get_dp_group, get_ep_group
    from vllm.forward_context import get_forward_context

    rank = get_dp_group().rank_in_group
    # Token counts are the host's already: vLLM pads or exchanges them before the forward pass.
    counts = get_forward_context().dp_metadata.get_chunk_sizes_across_dp_rank()
    start = sum(counts[:rank])
    x, weights, ids = get_ep_group().dispatch(x, weights, ids, False)[:3]
    return x, weights, ids, (start, start + counts[rank])


def combine(y: Tensor) -> Tensor:
    """``[N, H]`` partial sums to this rank's own rows, summed over the data-parallel ranks."""
    from vllm.distributed import get_ep_group

    summed: Tensor = get_ep_group().combine(y, False)
    return summed
