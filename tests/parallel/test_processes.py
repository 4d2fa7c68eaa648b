"""Real processes over gloo: the same numbers as a simulation gives, to the bit, and no hang whatever a rank does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from foldmoe.parallel import simulate
from foldmoe.reference import reference_moe
from tests.parallel import jobs
from tests.parallel.support import PHYSICAL, PLACED, crowd, deal, make_case, pick, virtual, weights_of
from tests.parallel.workers import PATIENCE, JobError, Workers
from tests.support.cases import FLOAT32_TOLERANCE, assert_close
from tests.support.sparse import v4_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(150)

STRATEGIES: tuple[dict[str, Any], ...] = (
    {"strategy": "all_gather"},
    {"strategy": "all_to_all"},
    {"strategy": "all_to_all", "order": "route"},
)


def simulated(
    fold: str, experts: int, counts: list[int], crowded: int | None = None, placed: Any = None, **options: Any
) -> list[torch.Tensor]:
    routed, shared = weights_of(experts)
    weights = (pick(routed, placed) if placed else routed, shared)
    moe = virtual(weights, simulate(len(counts)), fold, **{"dtype": torch.float32} | options)
    case = make_case(sum(counts), experts, dtype=options.get("dtype", torch.float32))
    if crowded is not None:
        crowd(case, experts, len(counts), crowded)
    return moe.forward_ranks(deal(case, counts))


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize(
    ("counts", "experts"), [([4, 0], 4), ([9, 1], 5), ([0, 8], 4), ([3, 0, 5, 1], 7), ([0, 0, 0, 6], 8)]
)
def test_processes_give_the_bits_of_the_simulation(
    workers: Workers, fold: str, options: dict[str, Any], counts: list[int], experts: int
) -> None:
    options = options | {"backend": "rows"}
    results = workers.run("forward", len(counts), fold=fold, experts=experts, counts=counts, **options)
    expected = simulated(fold, experts, counts, **options)
    case = make_case(sum(counts), experts)
    for result, y in zip(results, expected, strict=True):
        assert np.array_equal(result["y"], y.numpy())
        assert sum(result["load"]) == case.topk_ids.numel()
        assert result["stats"]["rows"] == max(counts)
    assert_close(
        torch.cat([torch.from_numpy(result["y"]) for result in results]),
        reference_moe(*case.args, *weights_of(experts)),
        FLOAT32_TOLERANCE,
    )


@pytest.mark.parametrize("options", STRATEGIES[:2])
def test_bf16_tokens_of_an_fp8_layer(workers: Workers, options: dict[str, Any]) -> None:
    options = options | {"backend": "rows", "activations": "fp8", "dtype": torch.bfloat16}
    results = workers.run("forward", 2, fold="slot", experts=5, counts=[5, 3], **options)
    for result, y in zip(results, simulated("slot", 5, [5, 3], **options), strict=True):
        assert np.array_equal(result["y"], y.to(torch.float32).numpy())


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("counts", [[6, 3], [3, 0, 5, 1]])
def test_redundant_experts(workers: Workers, counts: list[int], fold: str, options: dict[str, Any]) -> None:
    """In the order of routes also the bits that the layer has without them."""
    options = options | {"backend": "rows"}
    replicas = options | {"placed": PLACED, "physical": PHYSICAL}
    results = workers.run("forward", len(counts), fold=fold, experts=5, counts=counts, **replicas)
    wanted = [simulated(fold, 5, counts, **replicas)]
    if "order" in options:
        wanted.append(simulated(fold, 5, counts, **options))
    for expected in wanted:
        for result, y in zip(results, expected, strict=True):
            assert np.array_equal(result["y"], y.numpy())
    case = make_case(sum(counts), 5)
    y = torch.cat([torch.from_numpy(result["y"]) for result in results])
    assert_close(y, reference_moe(*case.args, *weights_of(5)), FLOAT32_TOLERANCE)
    assert results[0]["load"] == torch.bincount(case.topk_ids.flatten(), minlength=5).tolist()


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
def test_all_routes_on_one_ranks_experts(workers: Workers, fold: str, options: dict[str, Any]) -> None:
    """The last rank has no token of its own, and all of the work."""
    arguments: dict[str, Any] = options | {"backend": "rows", "crowded": 3}
    results = workers.run("forward", 4, fold=fold, experts=8, counts=[3, 0, 5, 0], **arguments)
    for result, y in zip(results, simulated(fold, 8, [3, 0, 5, 0], **arguments), strict=True):
        assert np.array_equal(result["y"], y.numpy())
    case = crowd(make_case(8, 8), 8, 4, 3)
    y = torch.cat([torch.from_numpy(result["y"]) for result in results])
    assert_close(y, reference_moe(*case.args, *weights_of(8)), FLOAT32_TOLERANCE)
    assert results[0]["load"] == [0] * 6 + [16, 8]


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize(("counts", "late"), [([6, 3], [0]), ([6, 3], [1]), ([4, 0, 3, 2], [1, 2])])
def test_case_69_a_skew_of_100_ms_changes_no_bit(
    workers: Workers, counts: list[int], late: list[int], fold: str, options: dict[str, Any]
) -> None:
    arguments: dict[str, Any] = {"fold": fold, "experts": 5, "counts": counts, "backend": "rows"} | options
    punctual = workers.run("forward", len(counts), **arguments)
    for skewed, result in zip(workers.run("forward", len(counts), late=late, **arguments), punctual, strict=True):
        assert np.array_equal(skewed["y"], result["y"])


def test_case_62_the_size_of_an_exchange_comes_from_all_ranks(workers: Workers) -> None:
    results = workers.run("forward", 2, fold="native", experts=4, counts=[5, 3])
    assert [result["stats"]["rows"] for result in results] == [5, 5]
    results = workers.run(
        "forward", 2, fold="native", experts=4, counts=[5, 3], max_tokens_per_rank=2, overflow="rounds"
    )
    assert [result["stats"]["rounds"] for result in results] == [3, 3]


def test_case_60_too_many_tokens_are_the_same_error_on_every_rank(workers: Workers) -> None:
    for counts, found in (([9, 1], "rank 0 has 9"), ([0, 9], "rank 1 has 9"), ([2, 3, 4, 9], "rank 3 has 9")):
        results = workers.run("too_many", len(counts), counts=counts)
        assert len({str(result) for result in results}) == 1
        assert str(results[0]) == (
            f"ValueError: layers.3.ffn: {found} tokens, max_tokens_per_rank is 8; raise it, or run with "
            "overflow='rounds'"
        )


def test_a_rank_with_bad_arguments_stops_all_and_the_group_lives_on(workers: Workers) -> None:
    for away, problem in (
        (False, "must both be [3, 3], found [3, 4]"),
        (True, "all arguments must lie on cpu, found topk_weights on meta"),
    ):
        first, second = workers.run("one_rank_wrong", 2, away=away)
        assert "ValueError: layers.3.ffn: the arguments of rank 1 do not fit" in str(first)
        assert problem in str(second)
    assert "y" in workers.run("forward", 2, fold="native", experts=4, counts=[1, 1])[0]


def test_bad_arguments_where_counts_are_stated_end_the_others_wait_by_its_timeout(workers: Workers) -> None:
    (told, waited), (own, at_once), *_ = workers.run("one_rank_wrong_and_untold", 4, timeout=2.0)
    assert own.startswith("ValueError: layers.3.ffn: topk_ids and topk_weights must both be [3, 3], found [3, 4]")
    assert at_once < 1
    assert told.startswith("GroupError: rank 0 of 2: the all-gather failed: another rank has left the group, or did")
    assert 1.5 < waited < 6


def test_ranks_with_different_policies_stop_naming_rank_layer_and_difference(workers: Workers, tmp_path: Path) -> None:
    v4_checkpoint(tmp_path, hidden=256, width=128, layers=2, experts=8, block=128, drafts=1, draft_experts=4)
    folds = ["native", "native", "off", "native"]
    results = workers.run("differing_policies", 4, folder=str(tmp_path), folds=folds)
    assert len({str(result) for result in results}) == 1
    assert str(results[0]).startswith("PlanMismatchError: ranks of one group must fold alike")
    for layer in ("layers.0.ffn", "layers.1.ffn", "mtp.0.ffn"):
        assert f"rank 2 differs from rank 0 in {layer}: strategy is 'serial', not 'native'" in str(results[0])
    assert "rank 1" not in str(results[0])
    assert workers.run("differing_policies", 2, folder=str(tmp_path), folds=["native", "native"]) == [None, None]


def test_layers_folded_differently_never_start(workers: Workers) -> None:
    for result in workers.run("differing_layers", 2, folds=["native", "slot"]):
        assert "rank 1 differs from rank 0 in layers.3.ffn: strategy is 'slot', not 'native'" in str(result)


def _same(workers: Workers, ranks: int, rounds: int, compared: int = 18, patience: float = PATIENCE) -> None:
    """Every round ends; the first ones are compared with a simulation."""
    results = workers.run("many", ranks, rounds=rounds, patience=patience)
    expected = jobs.many_virtual(ranks, compared)
    for rank, outputs in enumerate(results):
        assert not isinstance(outputs, JobError), outputs
        assert len(outputs) == rounds
        assert all(np.array_equal(y, turn[rank]) for y, turn in zip(outputs, expected, strict=False))


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 120), (4, 18)])
def test_random_rounds_end_and_give_the_simulations_bits(workers: Workers, ranks: int, rounds: int) -> None:
    _same(workers, ranks, rounds)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 4])
def test_1000_random_rounds(workers: Workers, ranks: int) -> None:
    _same(workers, ranks, 1000, patience=300.0)


def test_a_rank_that_does_not_answer_is_an_error_within_the_timeout(workers: Workers) -> None:
    (message, seconds), *_ = workers.run("silent", 4, timeout=2.0)
    assert message.startswith("GroupError: rank 0 of 2: the all-gather failed: another rank has left the group, or did")
    assert seconds < 6


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_gives_the_others_an_error_and_no_hang(ranks: int, tmp_path: Path) -> None:
    started = time.monotonic()
    with Workers(ranks, tmp_path) as group:
        *survivors, dead = group.run("dies", ranks, timeout=5.0)
    assert dead is None
    assert len(survivors) == ranks - 1
    for survivor in survivors:
        assert survivor.startswith("GroupError after ")
        assert float(survivor.split()[2]) < 9
    assert time.monotonic() - started < 60
