"""Routes such as a layer's own router gives: its tensors from the checkpoint, its rule from config.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from foldmoe.checkpoint.shards import CheckpointError
from foldmoe.moe import routing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from foldmoe.checkpoint.config import ModelFacts
    from foldmoe.checkpoint.specs import MoELayer


def check_router(layer: MoELayer, router: Mapping[str, Tensor], experts: int) -> None:
    """Look at what router tensors hold; their shapes were audited with the layer's.

    Args:
        router: by role.
        experts: routed experts of the layer.

    Raises:
        CheckpointError: a NaN or Inf, or a hash table with ids that no expert has; the message names the tensor.
    """
    for role, tensor in router.items():
        name = layer.block.router[role]
        if role != "table":
            odd = int((~tensor.isfinite()).sum())
            if odd:
                raise CheckpointError(f"{name}: {odd} values are NaN or Inf; download or write it again")
            continue
        if not len(tensor):
            raise CheckpointError(f"{name} is empty; expected a row for every token id")
        low, high = (int(end) for end in tensor.aminmax())
        if low < 0 or high >= experts:
            raise CheckpointError(f"{name} holds the ids {low} .. {high}; the layer's experts are 0 .. {experts - 1}")


def routes(
    x: Tensor, router: Mapping[str, Tensor], k: int, facts: ModelFacts, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Ids and weights ``[M, K]`` of a layer's own router for ``x [M, H]``; a hash layer gets random token ids."""
    logits = x.float() @ router["weight"].float().T
    bias = router.get("bias")
    bias = None if bias is None else bias.flatten()
    scoring: Any = facts.scoring or ("softmax" if bias is None else "sigmoid")
    common: dict[str, Any] = {
        "scoring": scoring, "renormalize": facts.renormalize, "routed_scale": facts.routed_scale
    }  # fmt: skip
    table = router.get("table")
    if table is not None:
        tokens = torch.randint(0, table.shape[0], (x.shape[0],), generator=random)
        return routing.hashed(logits, tokens, table, **common)
    groups = facts.groups if logits.shape[1] % facts.groups == 0 else 1
    return routing.top_k(logits, k, bias=bias, groups=groups, top_groups=min(facts.top_groups, groups), **common)
