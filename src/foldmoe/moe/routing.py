"""From router logits to expert ids and weights, as each model family defines it.

Every function returns ``(topk_ids [M, K] int64, topk_weights [M, K] float32)`` of routed experts only: a shared
expert's slot never comes out of a router.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Scoring = Literal["softmax", "sigmoid", "sqrtsoftplus"]


def scores(logits: Tensor, scoring: Scoring) -> Tensor:
    """Router logits ``[M, E]`` to scores ``[M, E]`` (float32).

    Sources: softmax, Qwen and DeepSeek-V2; sigmoid, DeepSeek-V3 and GLM-4.5; sqrt(softplus), DeepSeek-V4.

    Raises:
        ValueError: an unknown ``scoring``.
    """
    wide = logits.to(torch.float32)
    if scoring == "softmax":
        return wide.softmax(dim=-1)
    if scoring == "sigmoid":
        return wide.sigmoid()
    if scoring == "sqrtsoftplus":
        return torch.nn.functional.softplus(wide).sqrt()
    raise ValueError(f"scoring must be softmax, sigmoid or sqrtsoftplus, found {scoring!r}")


def top_k(
    logits: Tensor,
    k: int,
    *,
    scoring: Scoring,
    bias: Tensor | None = None,
    groups: int = 1,
    top_groups: int = 1,
    renormalize: bool = True,
    routed_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Select the k best experts of every token.

    Args:
        logits: ``[M, E]``.
        bias: correction bias ``[E]`` added to the scores for selection only; the weights never see it.
        groups, top_groups: choose within the ``top_groups`` best of ``groups`` equal ranges of experts. With a bias a
            group counts by the sum of its two best (DeepSeek-V3), without one by its best (DeepSeek-V2).
        renormalize: weights sum to 1 before the scale.
        routed_scale: ``routed_scaling_factor``, folded into the weights here, once.

    Raises:
        ValueError: if k exceeds the experts that can be chosen, or groups do not divide them.
    """
    tokens, experts = logits.shape
    if experts % groups or not 0 < top_groups <= groups:
        raise ValueError(
            f"{experts} experts in {groups} groups, {top_groups} of them chosen; expected groups of equal size, and at "
            "least one and at most all of them chosen"
        )
    if not 0 <= k <= experts // groups * top_groups:
        raise ValueError(f"top-k {k} of {experts // groups * top_groups} experts that can be chosen")
    plain = scores(logits, scoring)
    choice = plain if bias is None else plain + bias.to(torch.float32)
    if groups > 1:
        grouped = choice.view(tokens, groups, experts // groups)
        best = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1) if bias is not None else grouped.amax(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best.topk(top_groups, dim=-1).indices, True)
        choice = grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    ids = choice.topk(k, dim=-1).indices
    return ids, _weights(plain, ids, renormalize, routed_scale)


def hashed(
    logits: Tensor,
    token_ids: Tensor,
    table: Tensor,
    *,
    scoring: Scoring = "sqrtsoftplus",
    renormalize: bool = True,
    routed_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Experts looked up by token id (DeepSeek-V4's first layers); their weights still come from the logits.

    Args:
        token_ids: ``[M]``.
        table: ``tid2eid [vocabulary, K]``.
    """
    ids = table[token_ids.to(table.device)].to(torch.int64)
    return ids, _weights(scores(logits, scoring), ids, renormalize, routed_scale)


def _weights(plain: Tensor, ids: Tensor, renormalize: bool, routed_scale: float) -> Tensor:
    weights = plain.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return weights * routed_scale
