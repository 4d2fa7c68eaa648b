"""Cases of section 1: routing, ids, slots, weights. Each row's number is in the test's name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe.formats import Format
from foldmoe.layer import FoldedMoE
from foldmoe.moe import ExpertSpec, LayerSpec, Placement
from foldmoe.moe.routing import hashed, top_k
from foldmoe.moe.slots import SlotMap, append_shared_slot, expert_load, to_physical
from foldmoe.planner import FusionPolicy, plan_layer
from foldmoe.reference import reference_moe
from tests.support.cases import FLOAT32_TOLERANCE, assert_close, make_experts, make_layer, random_case
from tests.support.layers import FOLDS, HIDDEN, constant_experts, fold_layer, ones

if TYPE_CHECKING:
    from foldmoe.planner.policy import Fold


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("scale_in_weights", [True, False])
def test_case_1_the_shared_expert_contributes_exactly_once(fold: Fold, scale_in_weights: bool) -> None:
    layer = fold_layer(constant_experts(3, 3, 3, 3), constant_experts(1), fold)
    y = layer(ones(1), torch.tensor([[0, 2]]), torch.zeros(1, 2), routed_scale=1.0 if scale_in_weights else 2.5)
    assert_close(y, torch.ones(1, HIDDEN), FLOAT32_TOLERANCE)


def test_case_1_the_appended_slot_weighs_one_whatever_the_routed_weights_are() -> None:
    ids, routed = torch.tensor([[0, 2]]), torch.tensor([[1.5, 1.0]])
    _, weights = append_shared_slot(ids, routed, experts_per_rank=4, rank=0, top_k=2)
    assert weights.tolist() == [[1.5, 1.0, 1.0]]


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("scale_in_weights", [True, False])
def test_case_3_the_routed_scale_is_applied_once(fold: Fold, scale_in_weights: bool) -> None:
    layer = fold_layer(constant_experts(1, 7), constant_experts(0), fold)
    weight, scale = (0.4 * 2.5, 1.0) if scale_in_weights else (0.4, 2.5)
    y = layer(ones(1), torch.tensor([[0]]), torch.tensor([[weight]]), routed_scale=scale)
    assert_close(y, torch.ones(1, HIDDEN), FLOAT32_TOLERANCE)


def test_case_3_routing_functions_put_the_scale_into_the_weights_once() -> None:
    logits = torch.randn(5, 8)
    _, plain = top_k(logits, 2, scoring="sigmoid")
    _, scaled = top_k(logits, 2, scoring="sigmoid", routed_scale=2.5)
    torch.testing.assert_close(scaled, plain * 2.5)


@pytest.mark.parametrize("fold", FOLDS)
def test_case_5_a_list_wider_than_the_router_chooses_is_rejected(fold: Fold) -> None:
    layer = fold_layer(constant_experts(*range(8)), constant_experts(1), fold, top_k=2)
    with pytest.raises(ValueError, match=r"chooses 2 experts, found 3 ids.*never comes from the router"):
        layer(ones(1), torch.tensor([[0, 1, 2]]), torch.ones(1, 3))
    with pytest.raises(ValueError, match="3 wide but the router chooses 2"):
        append_shared_slot(torch.tensor([[0, 1, 2]]), torch.ones(1, 3), experts_per_rank=8, rank=0, top_k=2)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("kind", ["hash table", "softmax", "sigmoid", "sqrtsoftplus"])
def test_case_7_every_routing_kind_keeps_the_shared_expert(fold: Fold, kind: str) -> None:
    experts, hidden = 4, 32
    shared = make_experts(Format.MXFP4, 1, 32, hidden)
    routed = make_experts(Format.MXFP4, experts, 32, hidden, seed=1)
    silent = replace(routed, down=replace(routed.down, values=torch.zeros_like(routed.down.values)))
    logits = torch.randn(2, experts)
    if kind == "hash table":
        tid2eid = torch.tensor([[0, 3], [1, 2], [2, 0]])
        ids, weights = hashed(logits, torch.tensor([2, 1]), tid2eid)
    else:
        ids, weights = top_k(logits, 2, scoring=kind)  # type: ignore[arg-type]
    x = torch.randn(2, hidden)
    y = fold_layer(silent, shared, fold)(x, ids, weights)
    alone = reference_moe(x, ids.fill_(-1), weights, silent, shared)
    assert float(alone.norm()) > 0
    assert_close(y, alone, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("fold", FOLDS)
def test_case_8_the_plan_decides_where_the_shared_weights_go(fold: Fold) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 4, 64, 64, 32)
    layer = fold_layer(routed, shared, fold)
    held = layer.packed.unpack()
    assert held[0].num_experts == (5 if layer.plan.strategy == "slot" else 4)
    assert (held[1] is None) == (layer.plan.strategy == "slot")
    found = layer.unpack()
    for stored, back in zip((routed, shared), found, strict=True):
        assert back is not None
        for tensor, again in ((stored.gate_up, back.gate_up), (stored.down, back.down)):
            for role, original in tensor.tensors().items():
                assert torch.equal(original.view(torch.uint8), again.tensors()[role].view(torch.uint8))


@pytest.mark.parametrize("fold", FOLDS)
def test_case_8_a_plan_made_before_is_the_one_that_runs(fold: Fold) -> None:
    routed, shared = make_layer(Format.BF16, Format.BF16, 4, 64, 64, 32)
    first = fold_layer(routed, shared, fold, top_k=2)
    again = FoldedMoE(routed, shared, plan=first.plan)
    assert again.plan is first.plan
    case = random_case(3, 2, 4, 32)
    assert torch.equal(again(*case.args), first(*case.args))
    assert again.packed.unpack()[0].num_experts == first.packed.unpack()[0].num_experts


def test_case_11_every_rank_has_a_slot_of_its_own() -> None:
    slots = SlotMap.even(4, 2)
    assert [slots.shared_slot(rank) for rank in range(2)] == [2, 5]
    with pytest.raises(ValueError, match=r"must lie in -1 \.\. 3, found 4 \.\. 4"):
        slots.to_slots(torch.tensor([[4]]))


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_case_11_ranks_add_up_to_the_whole_layer(fold: Fold, ranks: int) -> None:
    experts, hidden, tokens = 4, 32, 9
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, experts, 64, 64, hidden)
    case = random_case(tokens, 2, experts, hidden, dtype=torch.float32)
    total = torch.zeros(tokens, hidden)
    for rank in range(ranks):
        place = Placement(ep_size=ranks, ep_rank=rank)
        held = place.experts(experts)
        mine = routed[held.start : held.stop]
        layer = fold_layer(mine, shared, fold, placement=place, num_experts=experts)
        rows = (rank * tokens // ranks, (rank + 1) * tokens // ranks)
        total += layer(*case.args, shared_rows=rows)
    assert_close(total, reference_moe(*case.args, routed, shared), FLOAT32_TOLERANCE)


def test_case_12_statistics_count_logical_routed_ids_only() -> None:
    logical = torch.stack([torch.randperm(4)[:2] for _ in range(10)])
    load = expert_load(logical, 4)
    assert load.shape == (4,)
    assert int(load.sum()) == 10 * 2
    physical = to_physical(logical, torch.tensor([[0, 4], [1, 5], [2, -1], [3, -1]]))
    slots, _ = append_shared_slot(physical, torch.ones(10, 2), experts_per_rank=3, rank=1, top_k=2, ranks=2)
    assert slots.shape == (10, 3)
    assert torch.equal(expert_load(logical, 4), load), "mapping to slots leaves the logical ids alone"


@pytest.mark.parametrize("fold", FOLDS)
def test_case_14_duplicate_ids_add_up(fold: Fold) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 4, 64, 64, 32)
    layer, x = fold_layer(routed, shared, fold), torch.randn(1, 32)
    thrice = layer(x, torch.tensor([[3, 3, 3]]), torch.tensor([[0.2, 0.3, 0.5]]))
    assert_close(thrice, layer(x, torch.tensor([[3]]), torch.ones(1, 1)), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ids", [[[-1, -1], [0, -1]], [[-1, -1], [-1, -1]]])
def test_case_15_minus_one_is_no_route_and_shared_still_runs(
    fold: Fold, dtype: torch.dtype, ids: list[list[int]]
) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 4, 64, 64, 32)
    x, routes = torch.randn(2, 32), torch.tensor(ids, dtype=dtype)
    weights = torch.full((2, 2), torch.nan).masked_fill(routes >= 0, 1.0)
    y = fold_layer(routed, shared, fold)(x, routes, weights)
    assert_close(y, reference_moe(x, routes, weights, routed, shared), FLOAT32_TOLERANCE)
    assert (y[0] != 0).any()


@pytest.mark.parametrize("fold", FOLDS)
def test_case_18_expert_0_is_an_expert(fold: Fold) -> None:
    layer = fold_layer(constant_experts(5, 9), constant_experts(1), fold)
    y = layer(ones(1), torch.tensor([[0]]), torch.ones(1, 1))
    assert_close(y, torch.full((1, HIDDEN), 6.0), FLOAT32_TOLERANCE)


def test_case_18_a_rank_that_holds_expert_0_only_runs_it() -> None:
    layer = fold_layer(
        constant_experts(5), constant_experts(1), "native", placement=Placement(ep_size=2), num_experts=2
    )
    y = layer(ones(2), torch.tensor([[0], [1]]), torch.ones(2, 1))
    assert_close(y, torch.tensor([[6.0], [1.0]]).expand(2, HIDDEN), FLOAT32_TOLERANCE)


def test_case_21_a_range_of_experts_past_the_end_is_refused() -> None:
    place = Placement(ep_size=4, ep_rank=3)
    assert place.experts(8) == range(6, 8)
    with pytest.raises(ValueError, match="rank holds 4 experts, its placement says 2"):
        fold_layer(constant_experts(1, 2, 3, 4), constant_experts(1), "native", placement=place, num_experts=8)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("bad", [[[8]], [[-2]]])
def test_case_21_ids_past_the_end_are_refused(fold: Fold, bad: list[list[int]]) -> None:
    layer = fold_layer(constant_experts(*range(8)), constant_experts(1), fold)
    with pytest.raises(ValueError, match=r"ids must lie in -1 \.\. 7"):
        layer(ones(1), torch.tensor(bad), torch.ones(1, 1))


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("experts", [1, 7, 160, 384])
def test_case_23_any_number_of_experts_plans_like_128(fold: Fold, experts: int) -> None:
    def plan(count: int) -> tuple[object, ...]:
        routed = ExpertSpec(count, 64, Format.MXFP4)
        spec = LayerSpec("layers.0", 128, 1, routed, ExpertSpec(1, 64, Format.MXFP4))
        made = plan_layer(spec, FusionPolicy(fold, backend="torch"), "cpu")
        return made.strategy, made.arm, made.backend, made.reasons, made.padded_width

    assert plan(experts) == plan(128)
