"""Routing rules, written out once more here, one token at a time."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foldmoe.moe import routing

if TYPE_CHECKING:
    from foldmoe.moe.routing import Scoring

SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "sqrtsoftplus")


def score_list(logits: list[float], scoring: Scoring) -> list[float]:
    if scoring == "softmax":
        total = sum(math.exp(v) for v in logits)
        return [math.exp(v) / total for v in logits]
    if scoring == "sigmoid":
        return [1 / (1 + math.exp(-v)) for v in logits]
    return [math.sqrt(math.log1p(math.exp(v))) for v in logits]


@st.composite
def router_logits(draw: st.DrawFn) -> Tensor:
    tokens, experts = draw(st.integers(0, 5)), draw(st.sampled_from([8, 12, 16]))
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**31))))


@pytest.mark.parametrize("scoring", SCORINGS)
def test_scores_follow_their_definition(scoring: Scoring) -> None:
    logits = torch.randn(3, 6)
    found = routing.scores(logits, scoring)
    for row, expected in zip(found.tolist(), (score_list(r, scoring) for r in logits.tolist()), strict=True):
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("scoring", SCORINGS)
def test_scores_are_float32_whatever_the_logits_are(scoring: Scoring) -> None:
    assert routing.scores(torch.randn(2, 4).to(torch.bfloat16), scoring).dtype == torch.float32


def test_an_unknown_scoring_is_refused() -> None:
    with pytest.raises(ValueError, match="must be softmax, sigmoid or sqrtsoftplus, found 'relu'"):
        routing.scores(torch.randn(2, 4), "relu")  # type: ignore[arg-type]


@given(router_logits(), st.sampled_from(SCORINGS), st.integers(0, 8), st.booleans(), st.sampled_from([1.0, 2.5]))
def test_top_k_takes_the_best_scores_and_weighs_by_them(
    logits: Tensor, scoring: Scoring, k: int, renormalize: bool, scale: float
) -> None:
    ids, weights = routing.top_k(logits, k, scoring=scoring, renormalize=renormalize, routed_scale=scale)
    assert (ids.shape, weights.shape) == ((len(logits), k), (len(logits), k))
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    for row, chosen, found in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        scores = score_list(row, scoring)
        assert set(chosen) == set(sorted(range(len(scores)), key=lambda e: -scores[e])[:k])
        total = sum(scores[e] for e in chosen) if renormalize and k else 1.0
        assert found == pytest.approx([scores[e] / total * scale for e in chosen], rel=1e-4)


@given(router_logits(), st.sampled_from(SCORINGS))
def test_a_correction_bias_changes_the_choice_and_never_the_weights(logits: Tensor, scoring: Scoring) -> None:
    bias = torch.zeros(logits.shape[1])
    bias[5] = 100.0
    ids, weights = routing.top_k(logits, 2, scoring=scoring, bias=bias, renormalize=False)
    assert (ids == 5).any(dim=-1).all()
    assert torch.equal(weights, routing.scores(logits, scoring).gather(1, ids))


@given(router_logits(), st.booleans(), st.integers(1, 4), st.integers(1, 2))
def test_grouped_top_k_chooses_within_the_best_groups(logits: Tensor, biased: bool, top_groups: int, k: int) -> None:
    experts = logits.shape[1]
    bias = torch.linspace(-0.3, 0.3, experts) if biased else None
    ids, _ = routing.top_k(logits, k, scoring="sigmoid", bias=bias, groups=4, top_groups=top_groups)
    size = experts // 4
    for row, chosen in zip(logits.tolist(), ids.tolist(), strict=True):
        choice = [s + (float(bias[e]) if bias is not None else 0) for e, s in enumerate(score_list(row, "sigmoid"))]
        groups = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(4)]
        rank = [sum(g[:2]) if biased else g[0] for g in groups]
        kept = sorted(range(4), key=lambda g: -rank[g])[:top_groups]
        allowed = [e for e in range(experts) if e // size in kept]
        assert set(chosen) == set(sorted(allowed, key=lambda e: -choice[e])[:k])


@pytest.mark.parametrize("k", [9, -1])
def test_more_choices_than_experts_are_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"top-k {k} of 8 experts"):
        routing.top_k(torch.randn(2, 8), k, scoring="softmax")


def test_top_k_must_fit_the_chosen_groups() -> None:
    with pytest.raises(ValueError, match="top-k 3 of 2 experts that can be chosen"):
        routing.top_k(torch.randn(2, 8), 3, scoring="sigmoid", groups=4, top_groups=1)


@pytest.mark.parametrize(("groups", "top_groups"), [(3, 1), (4, 5), (4, 0)])
def test_groups_must_divide_the_experts(groups: int, top_groups: int) -> None:
    with pytest.raises(ValueError, match=f"8 experts in {groups} groups, {top_groups} of them chosen"):
        routing.top_k(torch.randn(2, 8), 1, scoring="sigmoid", groups=groups, top_groups=top_groups)


def test_hashed_routing_looks_experts_up_by_token_id() -> None:
    table = torch.tensor([[0, 3], [2, 1], [3, 2]], dtype=torch.int32)
    logits = torch.randn(4, 5)
    ids, weights = routing.hashed(logits, torch.tensor([2, 0, 1, 2]), table, routed_scale=1.5)
    assert ids.tolist() == [[3, 2], [0, 3], [2, 1], [3, 2]]
    for row, chosen, found in zip(logits.tolist(), ids.tolist(), weights.tolist(), strict=True):
        scores = score_list(row, "sqrtsoftplus")
        total = sum(scores[e] for e in chosen)
        assert found == pytest.approx([scores[e] / total * 1.5 for e in chosen], rel=1e-5)


def test_weights_stay_finite_where_every_score_underflows() -> None:
    _, weights = routing.top_k(torch.full((1, 4), -1e4), 2, scoring="sigmoid")
    assert weights.isfinite().all()
