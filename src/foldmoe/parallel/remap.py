"""Every token's routes as slots, its own rank's shared slot last: one launch on a GPU, a torch expression elsewhere."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.moe.slots import append_shared_slot, ends

if TYPE_CHECKING:
    from foldmoe.moe.slots import SlotMap


def remap(
    ids: Tensor,
    weights: Tensor,
    slots: SlotMap,
    rank: int,
    *,
    top_k: int,
    shared_weights: Tensor | None = None,
    strays: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Routed ids to slots, and the route to ``rank``'s shared slot appended.

    Args:
        ids: ``[M, K]`` int32 or int64 physical experts, -1 for none.
        weights: ``[M, K]`` float32.
        slots: experts and slots of all ranks.
        rank: whose tokens these are.
        top_k: the layer's K. A list of another width is refused: one with a slot must not get a second.
        shared_weights: ``[M]``; 1 where None.
        strays: one int64 element that counts ids out of range, on a GPU.

    Returns:
        ``(ids [M, K+1], weights [M, K+1])`` in the dtypes of ``ids`` and float32.

    Raises:
        ValueError: shapes, a list that is not ``top_k`` wide; on a CPU, ids out of range.
        TypeError: ids that are no integers.
    """
    if ids.is_cuda and find_spec("triton") is not None:
        return launch(ids, weights, slots, rank, top_k=top_k, shared_weights=shared_weights, strays=strays)
    return append_shared_slot(
        ids, weights, experts_per_rank=slots.experts_per_rank, rank=rank, shared_weights=shared_weights, top_k=top_k
    )


def launch(
    ids: Tensor,
    weights: Tensor,
    slots: SlotMap,
    rank: int,
    *,
    top_k: int,
    shared_weights: Tensor | None = None,
    strays: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`remap` as the Triton kernel, whatever the device (the interpreter runs it on a CPU)."""
    from foldmoe.backends.triton.launch import launch_in_order
    from foldmoe.parallel.remap_kernel import BLOCK, remap_kernel

    tokens, width = ids.shape
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"expert ids must be int32 or int64, found {ids.dtype}")
    if weights.shape != ids.shape or (shared_weights is not None and shared_weights.numel() != tokens):
        raise ValueError(f"ids {list(ids.shape)}, weights {list(weights.shape)} and [M] shared weights do not fit")
    if width != top_k:
        raise ValueError(
            f"the route list is {width} wide but the router chooses {top_k}: "
            "a shared slot is appended here and never comes from the router"
        )
    out_ids = ids.new_empty(tokens, width + 1)
    out_weights = torch.empty(tokens, width + 1, dtype=torch.float32, device=ids.device)
    if not tokens:
        return out_ids, out_weights
    last = ends(slots.experts_per_rank, ids.device)
    plain = weights.to(torch.float32).contiguous()
    gate = plain if shared_weights is None else shared_weights.to(torch.float32).contiguous()
    ranks, total = len(slots.experts_per_rank), out_ids.numel()
    launch_in_order(
        remap_kernel, (-(-total // BLOCK),),
        ids.contiguous(), plain, gate, last, out_ids, out_weights,
        last.new_zeros(1) if strays is None else strays,
        total, width, ranks, slots.num_experts, slots.shared_slot(rank),
        GATED=shared_weights is not None, RANKS=1 << (ranks - 1).bit_length(), BLOCK=BLOCK,
    )  # fmt: skip
    return out_ids, out_weights
