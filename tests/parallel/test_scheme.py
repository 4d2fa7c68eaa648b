"""Buffer sizes come from one function; what an exchange at capacity takes in the worst case is exactly that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from foldmoe.parallel import simulate
from foldmoe.reference import reference_moe
from tests.parallel.support import TOP_K, deal, make_case, virtual, weights_of
from tests.support.cases import BF16_TOLERANCE, assert_close

STRATEGIES: tuple[dict[str, Any], ...] = (
    {"strategy": "all_gather"},
    {"strategy": "all_to_all"},
    {"strategy": "all_to_all", "order": "route"},
)


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_worst_routing_takes_the_stated_bytes(
    ranks: int, activations: str, fold: str, options: dict[str, Any]
) -> None:
    capacity, group = 5, simulate(ranks)
    moe = virtual(weights_of(4 * ranks), group, fold, max_tokens_per_rank=capacity, activations=activations, **options)
    scheme, seen, results = moe.scheme, [], set()
    for victim in range(ranks):
        case = make_case(capacity * ranks, 4 * ranks, dtype=torch.bfloat16)
        case.topk_ids.copy_(4 * victim + torch.arange(TOP_K))
        parts = [moe.route(rank, tokens, 1.0) for rank, tokens in enumerate(deal(case, [capacity] * ranks))]
        call = moe.dispatch(parts, capacity)[victim].call
        seen.append((call.x.nbytes, call.topk_ids.numel() * 8))
        results.add(moe.run_local(moe.local_layers[victim], call, capacity).to(scheme.result_dtype).nbytes)
    sizes = moe.buffer_bytes()
    assert {x for x, _ in seen} == {sizes["local x"]}
    assert {routes for _, routes in seen} == {sizes["local routes"]}
    assert results == {sizes["local results"]}
    assert sizes["rows received"] == (ranks - (options["strategy"] == "all_to_all")) * capacity * scheme.wire.row_bytes


@pytest.mark.parametrize("options", STRATEGIES)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_widest_routing_sends_and_gets_back_the_stated_bytes(
    ranks: int, activations: str, fold: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every route of a token on another rank, on as many of them as there are."""
    capacity, group = 5, simulate(ranks)
    moe = virtual(weights_of(4 * ranks), group, fold, max_tokens_per_rank=capacity, activations=activations, **options)
    case = make_case(capacity * ranks, 4 * ranks, dtype=torch.bfloat16)
    home = torch.arange(ranks).repeat_interleave(capacity)[:, None]
    away = home + 1 + torch.arange(TOP_K) % max(ranks - 1, 1)
    case.topk_ids.copy_(4 * (away % ranks) + torch.arange(TOP_K))
    parts = [moe.route(rank, tokens, 1.0) for rank, tokens in enumerate(deal(case, [capacity] * ranks))]
    going, coming = watch(group, monkeypatch)
    batches, sizes = moe.dispatch(parts, capacity), moe.buffer_bytes()
    sent = going[-1]
    if options["strategy"] == "all_to_all":  # a rank's own rows are packed too
        sent = [nbytes + batch.out.packed.nbytes for nbytes, batch in zip(sent, batches, strict=True)]
    local = zip(moe.local_layers, batches, strict=True)
    moe.combine(batches, [moe.run_local(layer, batch.call, capacity) for layer, batch in local])
    assert set(sent) == {sizes["rows sent"]}
    assert set(coming[-1]) == {sizes["results received"]}


def test_results_by_route_take_the_stated_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are laid out in float32 before they are added: the largest zeros that an exchange makes."""
    capacity, made, zeros = 5, [], torch.zeros

    def counted(*shape: Any, **options: Any) -> torch.Tensor:
        found = zeros(*shape, **options)
        made.append(found.nbytes)
        return found

    moe = virtual(weights_of(4), simulate(2), strategy="all_to_all", order="route", max_tokens_per_rank=capacity)
    parts = deal(make_case(2 * capacity, 4, dtype=torch.bfloat16), [capacity] * 2)
    monkeypatch.setattr(torch, "zeros", counted)
    moe.forward_ranks(parts)
    assert max(made) == moe.buffer_bytes()["results by route"]
    by_rank = virtual(weights_of(4), simulate(2), strategy="all_to_all", max_tokens_per_rank=capacity)
    assert "results by route" not in by_rank.buffer_bytes()


@pytest.mark.parametrize(
    ("dtype", "result_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("options", STRATEGIES)
def test_tokens_arrive_as_they_are_whatever_results_are_rounded_to(
    options: dict[str, Any], dtype: torch.dtype, result_dtype: torch.dtype
) -> None:
    capacity = 5
    moe = virtual(weights_of(4), simulate(1), dtype=dtype, result_dtype=result_dtype, max_tokens_per_rank=5, **options)
    case = make_case(capacity, 4, dtype=dtype)
    case.x.mul_(1e3 if dtype == torch.float16 else 1e5)  # more than fp16 holds
    tokens = deal(case, [capacity])[0]
    call = moe.dispatch([moe.route(0, tokens, 1.0)], capacity)[0].call
    assert torch.equal(call.x[:capacity].double(), case.x.double())
    result = moe.run_local(moe.local_layers[0], call, capacity)
    sizes = moe.buffer_bytes()
    assert (call.x.nbytes, result.nbytes) == (sizes["local x"], sizes["local results"])
    if result.dtype != result_dtype:
        assert result.to(result_dtype).nbytes == sizes["local results, rounded"]


@pytest.mark.parametrize("options", STRATEGIES[:2])
def test_tokens_beyond_fp16_give_results_within_it(options: dict[str, Any]) -> None:
    moe = virtual(weights_of(4), simulate(2), dtype=torch.bfloat16, result_dtype=torch.float16, **options)
    case = make_case(5, 4, dtype=torch.bfloat16)
    case = replace(case, x=case.x * 1e5, topk_weights=case.topk_weights / 1e6, shared_weights=torch.full((5,), 1e-6))
    truth = reference_moe(*case.args, *weights_of(4), shared_weights=case.shared_weights)
    assert_close(torch.cat(moe.forward_ranks(deal(case, [4, 1]))), truth, BF16_TOLERANCE)


def watch(group: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[int]], list[list[int]]]:
    """Bytes that each rank handed to each collective, and got."""
    going: list[list[int]] = []
    coming: list[list[int]] = []
    for name in ("all_gather", "all_to_all"):
        original = getattr(group, name)

        def watched(rows: Any, *counts: Any, original: Any = original) -> Any:
            going.append([mine.nbytes for mine in rows])
            found = original(rows, *counts)
            coming.append([mine.nbytes for mine in found])
            return found

        monkeypatch.setattr(group, name, watched)
    return going, coming


@pytest.mark.parametrize("options", STRATEGIES[:2])
def test_a_slot_adds_a_route_a_token_and_no_byte_on_the_wire(options: dict[str, Any]) -> None:
    native, slot = (
        virtual(weights_of(4), simulate(2), fold, max_tokens_per_rank=8, **options) for fold in ("native", "slot")
    )
    assert (native.scheme.local_top_k, slot.scheme.local_top_k) == (TOP_K, TOP_K + 1)
    a, b = native.buffer_bytes(), slot.buffer_bytes()
    assert b["local routes"] * TOP_K == a["local routes"] * (TOP_K + 1)
    assert {name: a[name] for name in a if name != "local routes"} == {n: b[n] for n in b if n != "local routes"}


@pytest.mark.parametrize("options", STRATEGIES)
def test_the_shared_route_causes_no_traffic(options: dict[str, Any]) -> None:
    moved = []
    for fold in ("native", "slot"):
        group = simulate(2)
        moe = virtual(weights_of(4), group, fold, **options)
        moe.forward_ranks(deal(make_case(9, 4, dtype=torch.bfloat16), [6, 3]))
        moved.append(group.moved)
    assert torch.equal(*moved)


def test_a_token_goes_once_to_a_rank_that_holds_several_of_its_experts() -> None:
    group = simulate(2)
    moe = virtual(weights_of(6), group, strategy="all_to_all", activations="fp8")
    case = make_case(4, 6, dtype=torch.bfloat16)
    case.topk_ids.copy_(torch.tensor([3, 4, 5]))  # all on rank 1
    moe.forward_ranks(deal(case, [4, 0]))
    counts = 8 + 16  # tokens of each rank, then rows for each rank
    assert int(group.moved[0, 1]) == counts + 4 * moe.scheme.wire.row_bytes
    assert int(group.moved[1, 0]) == counts + 4 * moe.scheme.result_bytes
