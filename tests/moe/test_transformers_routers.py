"""The routing functions against Transformers' own routers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foldmoe.moe import routing

pytest.importorskip("transformers", reason="compares with Transformers' own routers: install foldmoe[transformers]")

TOKENS, HIDDEN, EXPERTS, TOP_K = 33, 16, 32, 4


def config(**more: Any) -> Any:
    facts: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 1,
        "topk_group": 1,
        "vocab_size": 50,
        "scoring_func": "sqrtsoftplus",
    }
    return SimpleNamespace(**facts | more)


def router(family: str, name: str, config: Any) -> torch.nn.Module:
    module = pytest.importorskip(
        f"transformers.models.{family}.modeling_{family}", reason=f"this Transformers has no {family}"
    )
    built: torch.nn.Module = getattr(module, name)(config)
    torch.nn.init.normal_(built.weight, std=0.5)
    return built


def assert_same_routes(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor, Tensor]) -> None:
    """The same experts with the same weights; the order within a token is nobody's promise."""

    def dense(ids: Tensor, weights: Tensor) -> Tensor:
        return torch.zeros(TOKENS, EXPERTS).scatter_add_(1, ids, weights.to(torch.float32))

    _, weights, ids = theirs
    torch.testing.assert_close(dense(*ours), dense(ids, weights), rtol=1e-5, atol=1e-7)
    assert (dense(*ours) != 0).sum() == TOKENS * TOP_K


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (8, 4)])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v3", "DeepseekV3TopkRouter"), ("glm4_moe", "Glm4MoeTopkRouter")]
)
def test_sigmoid_with_bias_and_groups(family: str, name: str, renormalize: bool, groups: int, top_groups: int) -> None:
    theirs = router(family, name, config(n_group=groups, topk_group=top_groups, norm_topk_prob=renormalize))
    theirs.e_score_correction_bias.copy_(torch.randn(EXPERTS) * 0.2)
    x = torch.randn(TOKENS, HIDDEN)
    ours = routing.top_k(
        x @ theirs.weight.T,
        TOP_K,
        scoring="sigmoid",
        bias=theirs.e_score_correction_bias,
        groups=groups,
        top_groups=top_groups,
        renormalize=renormalize,
        routed_scale=2.5,
    )
    assert_same_routes(ours, theirs(x))


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(
    ("family", "name"), [("qwen2_moe", "Qwen2MoeTopKRouter"), ("qwen3_next", "Qwen3NextTopKRouter")]
)
def test_softmax(family: str, name: str, renormalize: bool) -> None:
    theirs = router(family, name, config(norm_topk_prob=renormalize))
    x = torch.randn(TOKENS, HIDDEN)
    ours = routing.top_k(x @ theirs.weight.T, TOP_K, scoring="softmax", renormalize=renormalize)
    assert_same_routes(ours, theirs(x))


@pytest.mark.parametrize(("method", "groups", "top_groups"), [("greedy", 1, 1), ("group_limited_greedy", 8, 3)])
def test_softmax_in_groups_without_a_bias(method: str, groups: int, top_groups: int) -> None:
    facts = config(topk_method=method, n_group=groups, topk_group=top_groups)
    theirs = router("deepseek_v2", "DeepseekV2TopkRouter", facts)
    x = torch.randn(TOKENS, HIDDEN)
    ours = routing.top_k(
        x @ theirs.weight.T,
        TOP_K,
        scoring="softmax",
        groups=groups,
        top_groups=top_groups,
        renormalize=False,
        routed_scale=2.5,
    )
    assert_same_routes(ours, theirs(x))


def test_sqrt_softplus_with_bias() -> None:
    theirs = router("deepseek_v4", "DeepseekV4TopKRouter", config())
    theirs.e_score_correction_bias.copy_(torch.randn(EXPERTS) * 0.2)
    x = torch.randn(TOKENS, HIDDEN)
    ours = routing.top_k(
        x @ theirs.weight.T,
        TOP_K,
        scoring="sqrtsoftplus",
        bias=theirs.e_score_correction_bias,
        routed_scale=2.5,
    )
    assert_same_routes(ours, theirs(x))


def test_hash_table_by_token_id() -> None:
    theirs = router("deepseek_v4", "DeepseekV4HashRouter", config())
    table = torch.rand(50, EXPERTS).argsort(dim=-1)[:, :TOP_K]
    theirs.tid2eid.copy_(table)
    x, token_ids = torch.randn(TOKENS, HIDDEN), torch.randint(0, 50, (TOKENS,))
    ours = routing.hashed(x @ theirs.weight.T, token_ids, table, routed_scale=2.5)
    assert torch.equal(ours[0], theirs(x, token_ids)[2])
    assert_same_routes(ours, theirs(x, token_ids))
