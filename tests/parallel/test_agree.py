"""One decision for all ranks, compared once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foldmoe.formats import Format
from foldmoe.moe import ExpertSpec, LayerSpec, Placement
from foldmoe.parallel import PlanMismatchError, agree, simulate
from foldmoe.parallel.agree import compare
from foldmoe.planner import CheckpointPlan, FusionPolicy, LayerPlan, plan_layer
from foldmoe.planner.devices import KNOWN


def plan(name: str = "layers.0", fold: str = "native", rank: int = 0) -> LayerPlan:
    spec = LayerSpec(name, 128, 2, ExpertSpec(8, 64, Format.MXFP4), ExpertSpec(1, 64, Format.MXFP4))
    policy = FusionPolicy(fold, backend="torch")  # type: ignore[arg-type]
    return plan_layer(spec, policy, "cpu", Placement(2, rank))


def test_ranks_that_plan_alike_agree_whatever_their_place_and_reasons() -> None:
    agree([plan(rank=0), replace(plan(rank=1), reasons=("another line",))], simulate(2))


@pytest.mark.parametrize(("experts", "ranks", "backend"), [(255, 2, "hopper"), (6, 8, "triton")])
def test_ranks_agree_where_experts_do_not_divide_evenly(experts: int, ranks: int, backend: str) -> None:
    pytest.importorskip("triton", reason="both backends need it")
    shared = ExpertSpec(1, 2048, Format.FP8_128x128, e8m0_scales=True)
    spec = LayerSpec("layers.0", 4096, 2, ExpertSpec(experts, 2048, Format.MXFP4), shared, activations="fp8")
    plans = [plan_layer(spec, device="h200", placement=Placement(ranks, rank)) for rank in range(ranks)]
    agree(plans, simulate(ranks))
    assert {one.backend for one in plans} == {backend}


def test_the_error_names_rank_layer_and_difference() -> None:
    with pytest.raises(PlanMismatchError) as found:
        agree([plan(), plan(), plan(fold="slot")], simulate(3))
    text = str(found.value)
    assert "rank 2 differs from rank 0 in layers.0: strategy is 'slot', not 'native'" in text
    assert "rank 1" not in text


def test_a_layer_that_one_rank_lacks_is_named() -> None:
    rows = (plan("layers.0"), plan("layers.1"))
    whole = CheckpointPlan("folder", KNOWN["cpu"], Placement(2), rows)
    with pytest.raises(PlanMismatchError, match=r"rank 1 differs from rank 0 in layers\.1: not planned there"):
        agree([whole, replace(whole, rows=rows[:1])], simulate(2))
    with pytest.raises(PlanMismatchError, match=r"rank 1 differs from rank 0 in layers\.1: planned there only"):
        agree([replace(whole, rows=rows[:1]), whole], simulate(2))


def test_settings_of_the_exchange_are_compared_too() -> None:
    with pytest.raises(PlanMismatchError, match=r"max_tokens_per_rank is 8, not 4, order is 'route', not None"):
        compare([{"a": {"max_tokens_per_rank": 4}}, {"a": {"max_tokens_per_rank": 8, "order": "route"}}], simulate(2))
