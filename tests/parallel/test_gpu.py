"""On GPUs: virtual ranks on one, an exchange inside a CUDA graph, NCCL where there are two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.formats import Format
from foldmoe.moe.merge import slot_weights
from foldmoe.parallel import simulate
from foldmoe.reference import reference_moe
from tests.parallel.support import deal, make_case, virtual, weights_of
from tests.parallel.workers import Workers
from tests.support.cases import FP8_TOLERANCE, assert_close, make_layer, random_case

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

STRATEGIES: tuple[dict[str, Any], ...] = (
    {"strategy": "all_gather"},
    {"strategy": "all_to_all"},
    {"strategy": "all_to_all", "order": "route"},
    {"strategy": "symmetric"},
)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
COUNTS = {2: [9, 1], 8: [1, 0, 2, 3, 0, 0, 4, 0]}


def check(device: str, ranks: int, fold: str, **options: Any) -> None:
    weights = weights_of(9)
    case = make_case(10, 9, dtype=torch.bfloat16)
    options = {"backend": "auto", "activations": "fp8"} | options
    moe = virtual(weights, simulate(ranks, device), fold, **options)
    y = torch.cat(moe.forward_ranks(deal(case.to(device), COUNTS[ranks])))
    assert_close(y.cpu(), reference_moe(*case.args, *weights, activations="fp8"), FP8_TOLERANCE)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("ranks", COUNTS)
def test_virtual_ranks_on_one_gpu(ranks: int, fold: str, options: dict[str, Any]) -> None:
    check("cuda", ranks, fold, **options)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
def test_eight_virtual_ranks_of_the_hopper_backend(fold: str, options: dict[str, Any]) -> None:
    """Other ranks' partial sums are rounded on their way, beside what FP8 tensor cores drop."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    routed, shared = make_layer(Format.MXFP4, Format.FP8_128x128, 16, 1024, 1024, 1024)
    assert shared is not None
    case = random_case(10, 3, 16, 1024, dtype=torch.bfloat16)
    options = {"backend": "hopper", "activations": "fp8", "allow_requantize": fold == "slot"} | options
    moe = virtual((routed, shared), simulate(8, "cuda"), fold, **options)
    plan = moe.local_layers[0].plan
    assert (plan.backend, plan.strategy) == ("hopper", fold)
    if fold == "slot":
        shared = slot_weights(shared.to("cuda"), requantize=True, padded_width=plan.padded_width).to("cpu")
    y = torch.cat(moe.forward_ranks(deal(case.to("cuda"), COUNTS[8])))
    assert_close(y.cpu(), reference_moe(*case.args, routed, shared, activations="fp8"), 1e-2)


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
