"""On GPUs: virtual ranks on one, an exchange inside a CUDA graph, NCCL where there are two."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch

from foldmoe.moe.merge import slot_weights
from foldmoe.parallel import simulate
from foldmoe.reference import reference_moe
from tests.parallel.support import PHYSICAL, deal, make_case, redundant, redundant_case, virtual, weights_of
from tests.parallel.workers import Workers
from tests.support.cases import FP8_TOLERANCE, assert_close, assert_same_bits, random_case
from tests.triton.support import weights

if TYPE_CHECKING:
    from pathlib import Path

    from foldmoe.moe import ExpertWeights

pytestmark = pytest.mark.gpu

STRATEGIES: tuple[dict[str, Any], ...] = (
    {"strategy": "all_gather"},
    {"strategy": "all_to_all"},
    {"strategy": "all_to_all", "order": "route"},
    {"strategy": "symmetric"},
)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
COUNTS = {1: [10], 2: [9, 1], 3: [0, 10, 0], 8: [1, 0, 2, 3, 0, 0, 4, 0]}


def check(device: str, ranks: int, fold: str, **options: Any) -> None:
    weights = weights_of(9)
    case = make_case(10, 9, dtype=torch.bfloat16)
    options = {"backend": "auto", "activations": "fp8"} | options
    moe = virtual(weights, simulate(ranks, device), fold, **options)
    y = torch.cat(moe.forward_ranks(deal(case.to(device), COUNTS[ranks])))
    assert_close(y.cpu(), reference_moe(*case.args, *weights, activations="fp8"), FP8_TOLERANCE)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_virtual_ranks_on_one_gpu(ranks: int, fold: str, options: dict[str, Any]) -> None:
    check("cuda", ranks, fold, **options)


class Layer(NamedTuple):
    """Formats (see ``tests.triton.support``), routed experts, and the width of all."""

    pair: str
    experts: int
    width: int
    hidden: int

    def __str__(self) -> str:
        return "-".join(map(str, self))


HOPPER = (
    Layer("mxfp4-fp8", 16, 1024, 1024),
    Layer("mxfp4-fp8_32", 16, 1152, 1280),
    Layer("mxfp4-fp8_e8m0", 8, 2048, 4096),
)
"""Formats of DeepSeek-V4.1-Flash in the second, sizes of DeepSeek-V4-Flash in the third."""


@cache
def stored(layer: Layer, device: str) -> tuple[ExpertWeights, ExpertWeights]:
    return weights(layer.pair, layer.experts, layer.width, layer.width, layer.hidden, device)


def check_layer(
    layer: Layer, device: str, fold: str, tolerance: float, backend: str = "hopper", **options: Any
) -> None:
    routed, shared = stored(layer, device)
    case = random_case(10, 3, layer.experts, layer.hidden, dtype=torch.bfloat16).to(device)
    options = {"backend": backend, "activations": "fp8", "allow_requantize": fold == "slot"} | options
    moe = virtual((routed, shared), simulate(8, device), fold, **options)
    plan = moe.local_layers[0].plan
    assert (plan.backend, plan.strategy) == (backend, fold)
    if fold == "slot":
        shared = slot_weights(shared, requantize=True, padded_width=plan.padded_width)
    y = torch.cat(moe.forward_ranks(deal(case, COUNTS[8])))
    assert_close(y, reference_moe(*case.args, routed, shared, activations="fp8"), tolerance)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("layer", HOPPER, ids=str)
def test_eight_virtual_ranks_of_the_hopper_backend(layer: Layer, fold: str, options: dict[str, Any]) -> None:
    """Other ranks' partial sums are rounded on their way, beside what FP8 tensor cores drop."""
    needs("hopper")
    check_layer(layer, "cuda", fold, 1e-2, **options)


def needs(backend: str) -> None:
    if backend == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


def check_bits(device: str, backend: str, layer: Layer, fold: str, each: int) -> None:
    """``each`` multiplies the tokens of COUNTS: with more of them, sizes of tiles differ from rank to rank."""
    case = random_case(10 * each, 3, layer.experts, layer.hidden, dtype=torch.float32).to(device)
    options: dict[str, Any] = {"strategy": "all_to_all", "order": "route", "dtype": torch.float32}
    options |= {"backend": backend, "activations": "fp8", "max_tokens_per_rank": 10 * each}

    def run(ranks: int) -> torch.Tensor:
        moe = virtual(stored(layer, device), simulate(ranks, device), fold, **options)
        assert {(one.plan.backend, one.plan.strategy) for one in moe.local_layers} == {(backend, fold)}
        return torch.cat(moe.forward_ranks(deal(case, [each * count for count in COUNTS[ranks]])))

    alone = run(1)
    assert_close(alone, reference_moe(*case.args, *stored(layer, device), activations="fp8"), 1e-2)
    for ranks in (2, 3, 8):
        assert_same_bits(run(ranks), alone, f"{ranks} ranks")


@pytest.mark.parametrize("each", [1, 7])
@pytest.mark.parametrize(
    ("backend", "layer", "fold"),
    [
        ("hopper", Layer("mxfp4-fp8", 16, 1024, 1024), "native"),
        ("hopper", Layer("mxfp4-mxfp4", 16, 1024, 1024), "slot"),
        ("hopper", Layer("fp8-fp8", 16, 1024, 1024), "native"),
        ("hopper", Layer("fp8-fp8", 16, 1024, 1024), "slot"),
        ("triton", Layer("mxfp4-fp8", 16, 576, 640), "native"),
        ("triton", Layer("mxfp4-mxfp4", 16, 576, 640), "slot"),
    ],
    ids=str,
)
def test_route_order_gives_the_same_bits_for_any_number_of_ranks(
    backend: str, layer: Layer, fold: str, each: int
) -> None:
    needs(backend)
    check_bits("cuda", backend, layer, fold, each)


def check_redundant(device: str, fold: str, stray: int, **options: Any) -> None:
    """An id that is no expert's is no route, is counted once, and takes no other expert's replica."""
    case = redundant_case(dtype=torch.bfloat16)
    without = replace(case, topk_ids=case.topk_ids.clone())
    case.topk_ids[2, 0], without.topk_ids[2, 0] = stray, -1
    options = {"backend": "auto", "activations": "fp8", "physical": PHYSICAL, "count_load": True} | options
    moe = virtual(redundant(), simulate(3, device), fold, **options)
    y, wanted = (torch.cat(moe.forward_ranks(deal(one.to(device), [2, 0, 2]))) for one in (case, without))
    assert torch.equal(y, wanted)
    assert moe.stats()["ids_out_of_range"] == (stray != -1)
    assert moe.load().tolist() == [8, 2, 2, 6, 0]
    assert_close(y.cpu(), reference_moe(*without.args, *weights_of(5), activations="fp8"), FP8_TOLERANCE)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("stray", [5, 2**32, -7])
def test_redundant_experts_and_an_id_out_of_range(stray: int, fold: str, options: dict[str, Any]) -> None:
    check_redundant("cuda", fold, stray, **options)


@pytest.mark.parametrize("strategy", ["all_gather", "symmetric"])
@pytest.mark.parametrize("fold", ["native", "slot"])
def test_an_exchange_in_a_cuda_graph(fold: str, strategy: Any) -> None:
    """With stated counts nothing waits for the device."""
    case = make_case(8, 9, dtype=torch.bfloat16).to("cuda")
    moe = virtual(weights_of(9), simulate(2, "cuda"), fold, backend="auto", activations="fp8", strategy=strategy)
    parts = deal(case, [4, 4])
    eager = torch.cat(moe.forward_ranks(parts, tokens_across_ranks=[4, 4]))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe.forward_ranks(parts, tokens_across_ranks=[4, 4])
    for _ in range(3):
        graph.replay()
        assert torch.equal(torch.cat(captured), eager)


def test_strays_are_counted() -> None:
    for fold, ranks, strategy in (
        ("native", 1, "all_gather"), ("slot", 1, "all_gather"), ("native", 2, "symmetric"), ("slot", 2, "symmetric")
    ):  # fmt: skip
        moe = virtual(weights_of(4), simulate(ranks, "cuda"), fold, backend="auto", strategy=strategy)
        case = make_case(2, 4, dtype=torch.bfloat16).to("cuda")
        case.topk_ids[0, 0] = 99
        moe.forward_ranks(deal(case, [2, 0][:ranks]))
        assert moe.stats()["ids_out_of_range"] == 1


@two_gpus
@pytest.mark.timeout(120)
def test_symmetric_memory_between_two_gpus(tmp_path: Path) -> None:
    """The all-gather's bits, 1000 random rounds, graphs that are replayed out of step, and a rank that never writes."""
    with Workers(2, tmp_path, backend="nccl") as pair:
        for fold in ("native", "slot"):
            for result in pair.run("one_sided", 2, rounds=500, fold=fold):
                assert result["fallback"] is None
                assert result["same"]
                assert result["finite"]
                assert result["stats"]["ids_out_of_range"] == 0
            for result in pair.run("one_sided_graph", 2, replays=201, fold=fold):
                assert result["same"]
        (message, lost, seconds), _ = pair.run("one_sided_silent", 2, timeout=1.0)
        assert message.startswith("GroupError: rank 0 of 2: rank 1 did not write its part of an exchange in time")
        assert lost
        assert 0.9 < seconds < 20


@two_gpus
def test_two_gpus_over_nccl(tmp_path: Path) -> None:
    with Workers(2, tmp_path, backend="nccl") as pair:
        for counts in ([9, 1], [4, 0]):
            case = make_case(sum(counts), 9, dtype=torch.bfloat16)
            truth = reference_moe(*case.args, *weights_of(9), activations="fp8")
            for fold in ("native", "slot"):
                for options in STRATEGIES:
                    arguments = {"fold": fold, "experts": 9, "counts": counts, "dtype": torch.bfloat16} | options
                    results = pair.run("forward", 2, backend="auto", activations="fp8", **arguments)
                    y = torch.cat([torch.from_numpy(result["y"]) for result in results])
                    assert_close(y, truth, FP8_TOLERANCE)
