"""Symmetric memory's protocol, played by virtual ranks over plain tensors in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.formats import fp8
from foldmoe.parallel import GroupError, simulate
from foldmoe.parallel.mailbox import HEADER, Unavailable, open_mailboxes
from foldmoe.parallel.one_sided import OneSided
from tests.parallel.support import (
    PHYSICAL,
    deal,
    make_case,
    redundant,
    redundant_case,
    register_rows,
    virtual,
    weights_of,
)

if TYPE_CHECKING:
    from foldmoe.parallel import ExpertParallelMoE
    from foldmoe.parallel.local import Routed

register_rows()


def outputs(strategy: str, counts: list[int], fold: str, experts: int, **options: Any) -> list[torch.Tensor]:
    gated = options.pop("gated", False)
    torch.manual_seed(0)
    case = make_case(sum(counts), experts, dtype=options["dtype"])
    if gated:
        case = replace(case, shared_weights=torch.rand(sum(counts)))
    moe = virtual(weights_of(experts), simulate(len(counts)), fold, backend="rows", strategy=strategy, **options)
    assert moe.scheme.dispatch == strategy
    return [y for _ in range(2) for y in moe.forward_ranks(deal(case, counts))]


@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize(("counts", "experts"), [([2, 0], 4), ([1, 0, 2], 5)])
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float32},
        {"dtype": torch.bfloat16, "activations": "fp8"},
        {"dtype": torch.float16, "activations": "fp8_token", "gated": True},
        {"dtype": torch.bfloat16, "result_dtype": torch.float32},
        {"dtype": torch.float32, "result_dtype": torch.bfloat16},
    ],
    ids=["float32", "fp8", "fp8_token-gated", "wide-results", "narrow-results"],
)
def test_the_bits_of_an_all_gather(fold: str, counts: list[int], experts: int, options: dict[str, Any]) -> None:
    found, expected = (outputs(s, counts, fold, experts, **options) for s in ("symmetric", "all_gather"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("counts", [[2, 2], [2, 0, 2]])
def test_redundant_experts_have_the_bits_of_an_all_gather(fold: str, counts: list[int]) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "physical": PHYSICAL, "backend": "rows"}
    case = redundant_case()
    found, expected = (
        virtual(redundant(), simulate(len(counts)), fold, strategy=strategy, **options)
        for strategy in ("symmetric", "all_gather")
    )
    assert found.fallback is None
    for _ in range(2):
        for mine, wanted in zip(*(moe.forward_ranks(deal(case, counts)) for moe in (found, expected)), strict=True):
            assert torch.equal(mine, wanted)


def pair(timeout: float = 1e-5, **options: Any) -> ExpertParallelMoE:
    """Two ranks whose waits end after ten polls."""
    group = simulate(2)
    moe = virtual(weights_of(4), group, backend="rows", **{"dtype": torch.float32, "strategy": "symmetric"} | options)
    moe.exchange = OneSided(moe.scheme, open_mailboxes(group, moe.scheme.mailbox_bytes, timeout), moe._strays)
    return moe


def parts_of(moe: ExpertParallelMoE, seed: int) -> list[Routed]:
    case = make_case(5, 4, seed=seed, dtype=moe.scheme.dtype)
    return [moe.route(rank, tokens, 1.0) for rank, tokens in enumerate(deal(case, [3, 2]))]


def test_a_rank_ahead_by_one_exchange_spoils_nothing() -> None:
    """Rank 0 sends exchange e + 1 before rank 1 has read e, which is as far ahead as any rank can get."""
    ahead, level = pair(), pair()
    exchange = ahead.exchange
    assert isinstance(exchange, OneSided)
    late = None
    for turn in range(3):
        mine, theirs = parts_of(ahead, turn)
        exchange._send(mine, 3)
        if late is not None:
            held = exchange._receive(late[0], 3).call
            assert torch.equal(held.x, late[1].x)
            assert torch.equal(held.topk_ids, late[1].topk_ids)
        exchange._send(theirs, 3)
        expected = level.exchange.dispatch(level.transport, [mine, theirs], 3)
        assert torch.equal(exchange._receive(mine, 3).call.x, expected[0].call.x)
        late = (theirs, expected[1].call)


def test_a_rank_that_never_writes_is_named_and_its_sums_are_nan() -> None:
    moe = pair()
    exchange = moe.exchange
    assert isinstance(exchange, OneSided)
    mine, _ = parts_of(moe, 0)
    exchange._send(mine, 3)
    batch = exchange._receive(mine, 3)
    assert not batch.call.x[3:].any()
    assert (batch.call.topk_ids[3:] == -1).all()
    (total,) = exchange.combine(moe.transport, [batch], [batch.call.x])
    assert total.isnan().all()
    message = "rank 0 of 2: rank 1 did not write its part of an exchange in time"
    with pytest.raises(GroupError, match=message):
        moe.forward_ranks(deal(make_case(5, 4), [3, 2]))
    with pytest.raises(GroupError, match=message):
        moe.stats()


def test_rows_in_the_mailbox_are_the_wires() -> None:
    """Every number that has a rounding of its own: subnormals, ties, saturation, NaN, Inf, zero."""
    moe = pair(dtype=torch.bfloat16, activations="fp8")
    scheme, exchange = moe.scheme, moe.exchange
    assert isinstance(exchange, OneSided)
    part = parts_of(moe, 0)[0]
    codes = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    special = torch.tensor([448.0, 2**-9, 2**-10, 3 * 2**-10, 0.0, -0.0, 1e38, 3e-5, float("nan"), float("inf")])
    dice = torch.Generator().manual_seed(0)
    for turn in range(5):
        x = codes[torch.randint(0, 2**16, part.x.shape, generator=dice)]
        x = torch.where(x.isnan() & (torch.rand(x.shape, generator=dice) < 0.9), 1.0, x)
        x[0, : len(special)] = special.to(torch.bfloat16) * (turn + 1)
        x[1] = (torch.randn(x.shape[1], generator=dice) * 2.0 ** (5 * turn - 10)).to(torch.bfloat16)
        exchange._send(replace(part, x=x), 3)
        box = exchange.mailboxes[0]
        start = HEADER + (turn + 1) % 2 * box.half
        rows = box.kept[0][start : start + 3 * scheme.wire.row_bytes].view(3, -1)
        found, ids, weights = scheme.wire.unpack(rows, torch.float32)
        values, scales = fp8.quantize_activations(x)
        assert torch.equal(found.nan_to_num(7e7), fp8.dequantize_activations(values, scales).nan_to_num(7e7))
        assert torch.equal(ids, part.ids.to(torch.int32))
        assert torch.equal(weights, part.weights)


def test_strays_become_minus_one_and_are_counted() -> None:
    moe = pair()
    case = make_case(4, 4)
    case.topk_ids[0, 0], case.topk_ids[3, 1] = 2**32, -7
    parts = [moe.route(rank, tokens, 1.0) for rank, tokens in enumerate(deal(case, [2, 2]))]
    moe.dispatch(parts, 2)
    assert moe.stats()["ids_out_of_range"] == 2


def test_what_a_mailbox_is_refused_for() -> None:
    for ranks in (1, HEADER // 8 + 1):
        with pytest.raises(Unavailable, match=rf"rank 0: a group of {ranks} ranks; mailboxes join 2 to 128"):
            open_mailboxes(simulate(ranks), 1024)


def test_more_tokens_than_capacity_run_in_rounds() -> None:
    options = {"dtype": torch.float32, "max_tokens_per_rank": 2, "overflow": "rounds"}
    found, expected = (outputs(s, [3, 2], "native", 4, **options) for s in ("symmetric", "all_gather"))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
