"""Virtual ranks: EP(R) against the oracle and against EP(1), over both strategies, both orders and every fold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.formats import Format
from foldmoe.parallel import ExpertParallelMoE, Tokens, simulate
from foldmoe.reference import reference_moe
from tests.parallel.support import (
    HIDDEN,
    PHYSICAL,
    PLACED,
    TOP_K,
    crowd,
    deal,
    make_case,
    pick,
    shard,
    virtual,
    weights_of,
)
from tests.support.cases import BF16_TOLERANCE, FLOAT32_TOLERANCE, FP8_TOLERANCE, assert_close, cases, random_case

if TYPE_CHECKING:
    from collections.abc import Sequence

STRATEGIES: tuple[dict[str, Any], ...] = (
    {"strategy": "all_gather"},
    {"strategy": "all_to_all"},
    {"strategy": "all_to_all", "order": "route"},
)
FOLDS = ("native", "slot", "off")
COUNTS: dict[int, Sequence[int]] = {1: [10], 2: [9, 1], 3: [0, 10, 0], 4: [4, 0, 0, 6], 8: [1, 0, 2, 3, 0, 0, 4, 0]}
TOKENS = 10


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("experts", [8, 7, 3])
@pytest.mark.parametrize("ranks", COUNTS)
def test_ranks_give_the_whole_layer(ranks: int, experts: int, fold: str, options: dict[str, Any]) -> None:
    weights, case = weights_of(experts), make_case(TOKENS, experts)
    moe = virtual(weights, simulate(ranks), fold, dtype=torch.float32, activations="bf16", **options)
    y = torch.cat(moe.forward_ranks(deal(case, COUNTS[ranks])))
    assert_close(y, reference_moe(*case.args, *weights), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("activations", ["bf16", "fp8", "fp8_token"])
def test_bf16_tokens(fold: str, activations: str, options: dict[str, Any]) -> None:
    weights = weights_of(7, shared=Format.FP8_32x32 if fold == "native" else Format.MXFP4)
    case = make_case(TOKENS, 7, dtype=torch.bfloat16)
    truth = reference_moe(*case.args, *weights, activations=activations)  # type: ignore[arg-type]
    moe = virtual(weights, simulate(4), fold, activations=activations, **options)
    y = torch.cat(moe.forward_ranks(deal(case, COUNTS[4])))
    assert y.dtype == torch.bfloat16
    assert_close(y, truth, BF16_TOLERANCE if activations == "bf16" else FP8_TOLERANCE)
    moe = virtual(weights, simulate(4), fold, activations=activations, result_dtype=torch.float32, **options)
    once = torch.cat(moe.forward_ranks(deal(case, COUNTS[4])))
    assert (once.double() - truth).norm() <= 1.02 * (y.double() - truth).norm(), "one rounding, at the end"


@pytest.mark.parametrize(
    ("activations", "dtype"),
    [("bf16", torch.float32), ("bf16", torch.bfloat16), ("fp8", torch.bfloat16), ("fp8", torch.float16)],
)
@pytest.mark.parametrize("fold", FOLDS)
def test_route_order_gives_the_same_bits_for_any_number_of_ranks(
    fold: str, activations: str, dtype: torch.dtype
) -> None:
    weights, case = weights_of(7), make_case(TOKENS, 7, dtype=dtype)
    options: dict[str, Any] = {"strategy": "all_to_all", "order": "route", "dtype": dtype, "backend": "rows"}

    def run(ranks: int, counts: Sequence[int]) -> torch.Tensor:
        moe = virtual(weights, simulate(ranks), fold, activations=activations, **options)
        return torch.cat(moe.forward_ranks(deal(case, counts)))

    alone = run(1, [TOKENS])
    for ranks, counts in (*COUNTS.items(), (2, [0, 10]), (2, [4, 6])):
        assert torch.equal(run(ranks, counts), alone)
    assert torch.equal(run(48, [0] * 38 + [1] * 10), alone)


@pytest.mark.parametrize(
    ("ranks", "fold", "options"),
    [(16, "slot", STRATEGIES[1]), *((48, fold, options) for fold in FOLDS for options in STRATEGIES)],
)
def test_16_and_48_ranks(ranks: int, fold: str, options: dict[str, Any]) -> None:
    experts, counts = 100, [(3 * rank) % 5 for rank in range(ranks)]
    weights, case = weights_of(experts), make_case(sum(counts), experts, top_k=6)
    moe = virtual(weights, simulate(ranks), fold, dtype=torch.float32, activations="bf16", top_k=6, **options)
    y = torch.cat(moe.forward_ranks(deal(case, counts)))
    assert_close(y, reference_moe(*case.args, *weights), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", FOLDS)
def test_every_awkward_input(fold: str, options: dict[str, Any]) -> None:
    weights = weights_of(8)
    widths: dict[int, ExpertParallelMoE] = {}
    for case in cases(9, TOP_K, 8, HIDDEN, dtype=torch.float32):
        if case.shared_rows is not None:
            continue  # who gets the shared part is what expert parallelism decides itself
        k = case.topk_ids.shape[1]
        if k not in widths:
            widths[k] = virtual(weights, simulate(3), fold, dtype=torch.float32, activations="bf16", top_k=k, **options)
        rows = len(case.x)
        bounds = [0, min(2, rows), min(2, rows), rows]  # rank 1 has none; padding, if any, is on rank 2
        parts = [Tokens(*case.args, case.shared_weights).rows(a, b) for a, b in pairwise(bounds)]
        if case.num_valid_tokens is not None:
            last = parts[2]
            parts[2] = Tokens(
                last.x, last.topk_ids, last.topk_weights, last.shared_weights, case.num_valid_tokens - bounds[2]
            )
        y = torch.cat(widths[k].forward_ranks(parts, routed_scale=case.routed_scale))
        assert_close(y, reference_moe(*case.args, *weights, **case.kwargs), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("ranks", COUNTS)
def test_all_routes_on_one_ranks_experts(ranks: int, last: bool, fold: str, options: dict[str, Any]) -> None:
    """On one expert where that rank has no other."""
    group, rank = simulate(ranks), min(ranks, 7) - 1 if last else 0
    weights, case = weights_of(7), crowd(make_case(TOKENS, 7), 7, ranks, rank)
    moe = virtual(weights, group, fold, dtype=torch.float32, activations="bf16", **options)
    y = torch.cat(moe.forward_ranks(deal(case, COUNTS[ranks])))
    assert_close(y, reference_moe(*case.args, *weights), FLOAT32_TOLERANCE)
    if options["strategy"] == "all_to_all":
        numbers = 8 * (1 + ranks)  # its tokens, then its rows for each rank
        away = torch.arange(ranks) != rank
        assert (group.moved[away][:, away].fill_diagonal_(numbers) == numbers).all(), "tokens go to that rank alone"


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("ranks", COUNTS)
def test_redundant_experts(ranks: int, fold: str, options: dict[str, Any]) -> None:
    routed, shared = weights_of(5)
    case, placed = make_case(TOKENS, 5), pick(routed, PLACED)
    options = options | {"dtype": torch.float32, "activations": "bf16", "physical": PHYSICAL, "count_load": True}
    moe = virtual((placed, shared), simulate(ranks), fold, **options)
    y = torch.cat(moe.forward_ranks(deal(case, COUNTS[ranks])))
    assert_close(y, reference_moe(*case.args, routed, shared), FLOAT32_TOLERANCE)
    assert torch.equal(moe.load(), torch.bincount(case.topk_ids.flatten(), minlength=5))


@pytest.mark.parametrize("fold", ["native", "slot"])
def test_redundant_experts_give_the_bits_of_none_in_the_order_of_routes(fold: str) -> None:
    routed, shared = weights_of(5)
    case, placed = make_case(TOKENS, 5), pick(routed, PLACED)
    options: dict[str, Any] = {"strategy": "all_to_all", "order": "route", "dtype": torch.float32, "backend": "rows"}
    (alone,) = virtual((routed, shared), simulate(1), fold, **options).forward_ranks(deal(case, [TOKENS]))
    for ranks, counts in COUNTS.items():
        moe = virtual((placed, shared), simulate(ranks), fold, physical=PHYSICAL, **options)
        assert torch.equal(torch.cat(moe.forward_ranks(deal(case, counts))), alone)


def test_a_replica_on_no_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"physical expert 6 is on no rank"):
        virtual(weights_of(5), simulate(1), dtype=torch.float32, physical=PHYSICAL)


@pytest.mark.parametrize("options", STRATEGIES)
def test_a_layer_without_a_shared_expert(options: dict[str, Any]) -> None:
    routed, _ = weights_of(5)
    case = make_case(TOKENS, 5)
    moe = virtual((routed, None), simulate(3), dtype=torch.float32, activations="bf16", **options)
    y = torch.cat(moe.forward_ranks(deal(case, COUNTS[3])))
    assert_close(y, reference_moe(*case.args, routed), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("options", STRATEGIES)
def test_rounds_give_the_bits_of_one_exchange(options: dict[str, Any]) -> None:
    weights, case = weights_of(5), make_case(TOKENS, 5)
    options = options | {"dtype": torch.float32, "backend": "rows"}
    once = virtual(weights, simulate(3), "slot", **options).forward_ranks(deal(case, [7, 0, 3]))
    moe = virtual(weights, simulate(3), "slot", max_tokens_per_rank=2, overflow="rounds", **options)
    assert torch.equal(torch.cat(moe.forward_ranks(deal(case, [7, 0, 3]))), torch.cat(once))
    assert moe.stats()["rounds"] == 4


@pytest.mark.parametrize("options", STRATEGIES[:2])
def test_stated_counts_spare_the_exchange_of_counts(options: dict[str, Any]) -> None:
    weights, case = weights_of(5), make_case(TOKENS, 5)
    moe = virtual(weights, simulate(2), dtype=torch.float32, **options)
    parts = deal(case, [9, 1])
    asked = moe.forward_ranks(parts)
    stated = moe.forward_ranks(parts, tokens_across_ranks=[9, 1])
    assert all(torch.equal(a, b) for a, b in zip(asked, stated, strict=True))
    with pytest.raises(ValueError, match=r"tokens_across_ranks says \[9, 2\], found \[9, 1\] here"):
        moe.forward_ranks(parts, tokens_across_ranks=[9, 2])


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("counts", [[0, 5], [3, 0, 2], [0, 0]])
def test_a_rank_without_tokens_takes_part_at_top_1_with_scaled_weights(
    counts: Sequence[int], gated: bool, fold: str, options: dict[str, Any]
) -> None:
    """A product of shape [0, 1] has another stride than any of the others."""
    weights, case = weights_of(5), make_case(sum(counts), 5, top_k=1)
    case = replace(case, shared_weights=torch.rand(sum(counts)) if gated else None, routed_scale=2.5)
    options = {"dtype": torch.float32, "activations": "bf16", "top_k": 1} | options
    moe = virtual(weights, simulate(len(counts)), fold, **options)
    y = torch.cat(moe.forward_ranks(deal(case, counts), routed_scale=2.5))
    assert_close(y, reference_moe(*case.args, *weights, **case.kwargs), FLOAT32_TOLERANCE)


def test_1000_random_rounds_end() -> None:
    group, weights, dice = simulate(2), weights_of(4), torch.Generator().manual_seed(0)
    kinds = [
        virtual(weights, group, fold, dtype=torch.float32, activations="bf16", max_tokens_per_rank=4, **options)
        for fold in ("native", "slot")
        for options in ({"overflow": "rounds"} | options for options in STRATEGIES)
    ]
    for turn in range(1000):
        counts = torch.randint(-2, 7, (2,), generator=dice).clamp_min(0).tolist()
        case = random_case(sum(counts), TOP_K, 4, HIDDEN, dtype=torch.float32, seed=turn)
        y = torch.cat(kinds[turn % len(kinds)].forward_ranks(deal(case, counts)))
        assert torch.isfinite(y).all()
        if turn % 50 < len(kinds):
            assert_close(y, reference_moe(*case.args, *weights), FLOAT32_TOLERANCE)


def test_the_simulation_reports_what_would_hang_a_real_group() -> None:
    group = simulate(2)
    with pytest.raises(ValueError, match="a real group would hang here"):
        group.all_to_all([torch.zeros(2, 1), torch.zeros(1, 1)], [[1, 1], [0, 1]], [[1, 1], [1, 1]])
    with pytest.raises(ValueError, match="needs as many equal parts"):
        group.all_gather([torch.zeros(2, 1), torch.zeros(1, 1)])
    with pytest.raises(ValueError, match="at least one rank, found 0"):
        simulate(0)


def test_what_does_not_fit_the_group_is_refused() -> None:
    weights = weights_of(4)
    two = [shard(weights, 2, rank) for rank in range(2)]
    with pytest.raises(ValueError, match=r"2 ranks are played here, with 1 layers"):
        ExpertParallelMoE(two[:1], simulate(2), 8)
    with pytest.raises(ValueError, match=r"rank 0 of the group holds the shard of ep_rank 1 of 2"):
        ExpertParallelMoE(two[::-1], simulate(2), 8)
    with pytest.raises(ValueError, match="give FoldedMoE its top_k"):
        ExpertParallelMoE(shard(weights, 1, 0, top_k=None), simulate(1), 8)  # type: ignore[arg-type]
    for options, message in (
        ({"strategy": "ring"}, "strategy must be one of all_gather, all_to_all, symmetric; found 'ring'"),
        ({"order": "random"}, "order must be one of rank, route; found 'random'"),
        ({"order": "route"}, "order 'route' needs strategy 'all_to_all'"),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank must be at least 1, found 0"),
    ):
        with pytest.raises(ValueError, match=message):
            virtual(weights, simulate(2), **options)


@pytest.mark.parametrize("strategy", ["all_gather", "all_to_all"])
def test_wrong_arguments_are_named(strategy: str) -> None:
    moe = virtual(weights_of(4), simulate(1), strategy=strategy, dtype=torch.float32)
    x, ids, weights = make_case(3, 4).args
    for arguments, error, message in (
        ((x.to(torch.bfloat16), ids, weights), TypeError, r"expected x torch\.float32"),
        ((x, ids.float(), weights), TypeError, "ids int32 or int64, found torch.float32 and torch.float32"),
        ((x[:, 1:], ids, weights), ValueError, r"x must be \[M, 160\], found \[3, 159\]"),
        ((x, ids, weights[:2]), ValueError, r"must both be \[3, 3\], found \[3, 3\] and \[2, 3\]"),
        ((x, ids + 4, weights), ValueError, r"ids must lie in -1 \.\. 3"),
        ((x, ids, weights.to("meta")), ValueError, "must lie on cpu, found topk_weights on meta"),
        ((x.to("meta"), ids.to("meta"), weights), ValueError, "lie on cpu, found x on meta, topk_ids on meta"),
    ):
        with pytest.raises(error, match=message):
            moe(*arguments)
    with pytest.raises(ValueError, match=r"shared_weights must be \[3\], found \[2\]"):
        moe(x, ids, weights, shared_weights=torch.ones(2))
    with pytest.raises(ValueError, match="pass count_load=True"):
        moe.load()


def test_warming_up_leaves_the_load_and_where_it_is_counted() -> None:
    """A graph that was captured before goes on adding to the same tensor."""
    moe = virtual(weights_of(4), simulate(2), dtype=torch.float32, count_load=True)
    counted, parts = moe._load, deal(make_case(5, 4), [3, 2])
    moe.forward_ranks(parts)
    before = moe.load()
    moe.warm(4, torch.int64, gated=False)
    assert moe._load is counted
    assert torch.equal(moe.load(), before)
