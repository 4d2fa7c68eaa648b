"""Cases of sections 1 and 4 under expert parallelism, by number; case 69 needs processes and is in test_processes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.moe import Placement
from foldmoe.parallel import ExpertParallelMoE, Tokens, simulate
from foldmoe.parallel.remap import remap
from foldmoe.planner import LayerPlan
from foldmoe.reference import reference_moe
from tests.parallel.support import deal, make_case, shard, virtual, weights_of
from tests.support.cases import FLOAT32_TOLERANCE, assert_close
from tests.support.layers import HIDDEN, constant_experts, fold_layer, ones

if TYPE_CHECKING:
    from collections.abc import Callable

    from foldmoe.backends import Call

STRATEGIES: tuple[dict[str, Any], ...] = (
    {"strategy": "all_gather"},
    {"strategy": "all_to_all"},
    {"strategy": "all_to_all", "order": "route"},
)
FOLDS = ("native", "slot", "off")


def constant(outputs: list[float], shared: float, ranks: int, fold: str, top_k: int, **options: Any) -> Any:
    """Experts that answer ones with constants, over ``ranks`` virtual ranks."""
    layers = []
    for rank in range(ranks):
        place = Placement(ep_size=ranks, ep_rank=rank)
        mine = constant_experts(*(outputs[expert] for expert in place.experts(len(outputs))))
        facts: dict[str, Any] = {"placement": place, "num_experts": len(outputs), "top_k": top_k}
        layers.append(fold_layer(mine, constant_experts(shared), fold, **facts))  # type: ignore[arg-type]
    return ExpertParallelMoE(layers, simulate(ranks), 8, dtype=torch.float32, **options)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("scale_in_weights", [True, False])
def test_case_1_the_shared_expert_counts_once_whoever_holds_the_routes(
    fold: str, options: dict[str, Any], scale_in_weights: bool
) -> None:
    moe = constant([3, 3, 3, 3], 1, 2, fold, 2, **options)
    nobody = Tokens(ones(0), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2))
    for ids in ([[0, 1]], [[2, 3]], [[0, 2]]):
        one = Tokens(ones(1), torch.tensor(ids), torch.zeros(1, 2))
        for parts in ([one, nobody], [nobody, one]):
            y = torch.cat(moe.forward_ranks(parts, routed_scale=1.0 if scale_in_weights else 2.5))
            assert_close(y, torch.ones(1, HIDDEN), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", FOLDS)
def test_case_5_a_route_list_with_a_slot_in_it_is_rejected(fold: str, options: dict[str, Any]) -> None:
    moe = constant(list(range(8)), 1, 1, fold, 2, **options)
    with pytest.raises(ValueError, match=r"must both be \[1, 2\], found \[1, 3\].*never comes from the router"):
        moe(ones(1), torch.tensor([[0, 1, 2]]), torch.ones(1, 3))
    slots = moe.scheme.slots
    with pytest.raises(ValueError, match="3 wide but the router chooses 2"):
        remap(torch.tensor([[0, 1, 2]]), torch.ones(1, 3), slots, 0, top_k=2)


@pytest.mark.parametrize("options", STRATEGIES)
def test_case_11_each_rank_runs_its_own_experts_and_its_own_slot(options: dict[str, Any]) -> None:
    moe = constant([10, 20, 30, 40], 1, 2, "slot", 1, **options)
    assert moe.scheme.ids_per_rank == (3, 3)
    tokens = Tokens(ones(4), torch.tensor([[0], [1], [2], [3]]), torch.ones(4, 1))
    for counts in ([4, 0], [0, 4], [2, 2]):
        bounds = (0, counts[0], 4)
        y = torch.cat(moe.forward_ranks([tokens.rows(*bounds[:2]), tokens.rows(*bounds[1:])]))
        assert_close(y, torch.tensor([[11.0], [21], [31], [41]]).expand(4, HIDDEN), FLOAT32_TOLERANCE)
    with pytest.raises(ValueError, match=r"ids must lie in -1 \.\. 3, found 4 \.\. 4"):
        moe.forward_ranks([Tokens(ones(1), torch.tensor([[4]]), torch.ones(1, 1)), tokens.rows(0, 0)])


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", FOLDS)
def test_case_12_statistics_count_logical_routed_experts(fold: str, options: dict[str, Any]) -> None:
    case = make_case(10, 4)
    moe = virtual(weights_of(4), simulate(2), fold, dtype=torch.float32, count_load=True, **options)
    moe.forward_ranks(deal(case, [7, 3]))
    assert moe.load().shape == (4,)
    assert int(moe.load().sum()) == 10 * case.topk_ids.shape[1]
    moe.forward_ranks(deal(case, [2, 8]))
    assert torch.equal(moe.load(), 2 * torch.bincount(case.topk_ids.flatten(), minlength=4))


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [[[-1, -1], [0, -1]], [[-1, -1], [-1, -1]]])
def test_case_15_minus_one_is_no_route_and_shared_still_runs(
    fold: str, options: dict[str, Any], dtype: torch.dtype, ids: list[list[int]]
) -> None:
    weights = weights_of(4)
    moe = virtual(weights, simulate(2), fold, dtype=torch.float32, activations="bf16", top_k=2, **options)
    routes = torch.tensor(ids, dtype=dtype)
    case = make_case(2, 4, top_k=2)
    absent = torch.full((2, 2), torch.nan).masked_fill(routes >= 0, 1.0)
    whole = Tokens(case.x, routes, absent)
    truth = reference_moe(case.x, routes, absent, *weights)
    for bounds in ((0, 2), (0, 1), (0, 0)):
        y = torch.cat(moe.forward_ranks([whole.rows(*bounds), whole.rows(bounds[1], 2)]))
        assert_close(y, truth, FLOAT32_TOLERANCE)
        assert (y != 0).any(dim=1).all()


@pytest.mark.parametrize("options", STRATEGIES)
def test_case_60_capacity_8_and_9_tokens(options: dict[str, Any]) -> None:
    case = make_case(9, 4)
    group = simulate(2)
    moe = virtual(weights_of(4), group, dtype=torch.float32, max_tokens_per_rank=8, **options)
    before = group.moved.clone()
    with pytest.raises(ValueError, match=r"rank 0 has 9 tokens, max_tokens_per_rank is 8"):
        moe.forward_ranks(deal(case, [9, 0]))
    counts_alone = 8 * (1 - torch.eye(2, dtype=torch.int64))
    assert torch.equal(group.moved - before, counts_alone), "refused before any token travelled"
    with pytest.raises(ValueError, match=r"rank 0 has 9 tokens, rank 1 has 10 tokens"):
        moe.forward_ranks(deal(make_case(19, 4), [9, 10]))
    moe = virtual(weights_of(4), group, dtype=torch.float32, max_tokens_per_rank=8, overflow="rounds", **options)
    y = torch.cat(moe.forward_ranks(deal(case, [9, 0])))
    assert_close(y, reference_moe(*case.args, *weights_of(4)), FLOAT32_TOLERANCE)
    assert moe.stats()["rounds"] == 2


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("counts", [(5, 3), (3, 5), (3, 3), (5, 0)])
def test_case_62_sizes_and_folding_come_from_shared_facts(
    options: dict[str, Any], counts: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers fold from 4 tokens on: what ran is looked at, so that a rank that went by its own 3 or 0 would show."""
    moe = virtual(weights_of(4), simulate(2), dtype=torch.float32, **options)
    launched: list[tuple[int, bool]] = []
    asked: list[int] = []
    folds_at = LayerPlan.folds_at

    def ask(plan: LayerPlan, tokens: int) -> bool:
        asked.append(tokens)
        return folds_at(plan, tokens)

    def watch(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def launch(call: Call, *, folded: bool) -> torch.Tensor:
            launched.append((len(call.x), folded))
            return forward(call, folded=folded)

        return launch

    monkeypatch.setattr(LayerPlan, "folds_at", ask)
    for layer in moe.local_layers:
        layer.plan = replace(layer.plan, fold_rows=((4, None),))
        monkeypatch.setattr(layer.packed, "forward", watch(layer.packed.forward))
    case, rows = make_case(sum(counts), 4), max(counts)
    y = torch.cat(moe.forward_ranks(deal(case, counts)))
    assert moe.stats()["rows"] == rows
    assert asked == [rows, rows], "both ranks ask about the same size"
    assert [folded for _, folded in launched] == [rows >= 4] * 2
    if options["strategy"] == "all_gather":
        assert [tokens for tokens, _ in launched] == [2 * rows] * 2, "a launch has the places of both ranks"
    assert_close(y, reference_moe(*case.args, *weights_of(4)), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("options", STRATEGIES)
def test_case_65_rows_of_an_idle_rank_are_no_tokens(options: dict[str, Any]) -> None:
    case = make_case(4, 4)
    moe = virtual(weights_of(4), simulate(2), "slot", dtype=torch.float32, count_load=True, **options)
    invented = Tokens(torch.full_like(case.x, torch.nan), case.topk_ids, case.topk_weights, num_valid_tokens=0)
    y = moe.forward_ranks([deal(case, [4])[0], invented])
    assert int(moe.load().sum()) == 4 * case.topk_ids.shape[1]
    assert (y[1] == 0).all()
    assert_close(y[0], reference_moe(*case.args, *weights_of(4)), FLOAT32_TOLERANCE)
    assert moe.stats()["tokens"] == 4


def test_case_1_one_rank_alone_is_the_plain_layer() -> None:
    weights, case = weights_of(4), make_case(5, 4)
    layer = shard(weights, 1, 0, activations="bf16")
    y = ExpertParallelMoE(layer, simulate(1), 8, dtype=torch.float32)(*case.args)
    assert_close(y, layer(*case.args), FLOAT32_TOLERANCE)
