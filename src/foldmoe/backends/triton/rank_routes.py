"""The launch behind :meth:`foldmoe.backends.PackedLayer.rank_routes` on GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foldmoe.backends.triton.arguments import host_or_device, host_or_device_rows
from foldmoe.backends.triton.kernels.rank_routes import BLOCK
from foldmoe.backends.triton.kernels.rank_routes import rank_routes as kernel
from foldmoe.backends.triton.launch import launch

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.backends.base import Call


def rank_routes(call: Call, experts: range, count: int, slot: bool, strays: Tensor) -> Call:
    """``call`` over all ``count`` experts as the call of the rank that holds ``experts``.

    Args:
        slot: see :meth:`foldmoe.backends.PackedLayer.rank_routes`.
        strays: ``[1]`` int64 that counts ids out of range, outside of padding.
    """
    tokens, top_k = call.topk_ids.shape
    ids, weights = (t if t.stride(1) == 1 else t.contiguous() for t in (call.topk_ids, call.topk_weights))
    out_ids = torch.empty(tokens, top_k + slot, dtype=ids.dtype, device=ids.device)
    out_weights = torch.empty(out_ids.shape, dtype=torch.float32, device=ids.device) if slot else weights
    if not out_ids.numel():
        return replace(call, topk_ids=out_ids)
    whole = call.shared_rows if call.shared_rows is not None else (0, tokens)
    start, end, rows = host_or_device_rows(whole, ids.device)
    valid, valid_rows = host_or_device(call.num_valid_tokens, tokens, ids.device)
    launch(
        kernel,
        (-(-out_ids.numel() // BLOCK),),
        {
            "ids": ids,
            "weights": weights,
            "gate": weights if call.shared_weights is None else call.shared_weights,
            "rows": ids if rows is None else rows,
            "valid_rows": ids if valid_rows is None else valid_rows,
            "strays": strays,
            "out_ids": out_ids,
            "out_weights": out_weights,
        },
        {
            "total": out_ids.numel(),
            "ids_stride": ids.stride(0),
            "weights_stride": weights.stride(0),
            "first": experts.start,
            "held": len(experts),
            "count": count,
            "valid": valid,
            "start": start,
            "end": end,
            "scale": float(call.routed_scale),
        },
        K=top_k,
        SLOT=slot,
        GATED=slot and call.shared_weights is not None,
        ROWS=slot and rows is not None,
        VALID=valid_rows is not None,
        BLOCK=BLOCK,
    )
    if not slot:
        return replace(call, topk_ids=out_ids)
    return replace(
        call,
        topk_ids=out_ids,
        topk_weights=out_weights,
        shared_weights=None,
        routed_scale=1.0,
        shared_rows=None,
    )
