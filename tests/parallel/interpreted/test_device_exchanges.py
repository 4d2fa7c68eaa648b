"""Kernels between collectives, in Triton's interpreter: the numbers of the torch expressions, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.parallel import rows, simulate
from foldmoe.parallel.device_exchanges import DeviceAllGather, DeviceAllToAll
from foldmoe.parallel.rows import Rows
from foldmoe.parallel.scatter import AllToAll
from foldmoe.reference import reference_moe
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
from tests.support.cases import FLOAT32_TOLERANCE, assert_close

if TYPE_CHECKING:
    from foldmoe.parallel import ExpertParallelMoE

register_rows()

KINDS = {"all_gather": DeviceAllGather, "all_to_all": DeviceAllToAll}
OPTIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": torch.float32},
    "fp8": {"dtype": torch.bfloat16, "activations": "fp8"},
    "fp8_token-gated": {"dtype": torch.float16, "activations": "fp8_token", "gated": True},
    "wide-results": {"dtype": torch.bfloat16, "result_dtype": torch.float32},
    "narrow-results": {"dtype": torch.float32, "result_dtype": torch.bfloat16},
}


def with_kernels(moe: ExpertParallelMoE) -> ExpertParallelMoE:
    moe.exchange = KINDS[moe.scheme.dispatch](moe.scheme, Rows(moe.scheme, moe._strays))
    return moe


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize(("counts", "experts"), [([2, 0, 1], 5), ([2], 3)])
@pytest.mark.parametrize("kind", OPTIONS)
def test_the_bits_of_the_torch_expressions(
    kind: str, counts: list[int], experts: int, fold: str, strategy: str
) -> None:
    options = dict(OPTIONS[kind])
    gated = options.pop("gated", False)
    torch.manual_seed(0)
    case = make_case(sum(counts), experts, dtype=options["dtype"])
    case.topk_ids[0, 1] = -1
    if gated:
        case = replace(case, shared_weights=torch.rand(sum(counts)))
    plain, fast = (
        virtual(weights_of(experts), simulate(len(counts)), fold, backend="rows", strategy=strategy, **options)
        for _ in range(2)
    )
    parts = deal(case, counts)
    for found, expected in zip(with_kernels(fast).forward_ranks(parts), plain.forward_ranks(parts), strict=True):
        assert found.dtype == options["dtype"]
        assert torch.equal(found, expected)
    fewer = plain.transport.moved - fast.transport.moved  # type: ignore[attr-defined]
    counts_alone = 8 * (len(counts) - 1) if strategy == "all_to_all" else 0  # one count a pair, not the whole matrix
    assert torch.equal(fewer, torch.full_like(fewer, counts_alone).fill_diagonal_(0))


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("top_k", [1, 8, 17])
def test_every_width_and_int32_ids(top_k: int, fold: str, strategy: str) -> None:
    options = {"dtype": torch.bfloat16, "strategy": strategy, "top_k": top_k, "backend": "rows"}
    case = make_case(3, 19, top_k=top_k, dtype=torch.bfloat16)
    case = replace(case, topk_ids=case.topk_ids.to(torch.int32))
    case.topk_ids[2, -1] = -1
    plain, fast = (virtual(weights_of(19), simulate(3), fold, **options) for _ in range(2))
    parts = deal(case, [2, 0, 1])
    for found, expected in zip(with_kernels(fast).forward_ranks(parts), plain.forward_ranks(parts), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("strategy", KINDS)
@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize("counts", [[2, 0, 2], [4]])
def test_redundant_experts(counts: list[int], fold: str, strategy: str) -> None:
    options: dict[str, Any] = {"dtype": torch.float32, "strategy": strategy, "physical": PHYSICAL, "backend": "rows"}
    case = redundant_case()
    plain, fast = (virtual(redundant(), simulate(len(counts)), fold, count_load=True, **options) for _ in range(2))
    parts = deal(case, counts)
    expected = plain.forward_ranks(parts)
    for found, wanted in zip(with_kernels(fast).forward_ranks(parts), expected, strict=True):
        assert torch.equal(found, wanted)
    assert_close(torch.cat(expected), reference_moe(*case.args, *weights_of(5)), FLOAT32_TOLERANCE)
    assert fast.load().tolist() == [4, 1, 1, 3, 1]


def test_a_message_is_the_wires() -> None:
    """Rows that hold tokens are byte for byte the torch expression's, as far as fields go; the others hold none."""
    moe = with_kernels(virtual(weights_of(5), simulate(2), dtype=torch.bfloat16, activations="fp8"))
    part = moe.route(0, deal(make_case(3, 5, dtype=torch.bfloat16), [3])[0], 1.0)
    wire = moe.scheme.wire
    message = moe.exchange._pack(part, 5)  # type: ignore[union-attr]
    fields = wire._fields[-1]
    assert torch.equal(message[:3, :fields], wire.pack(part.x, part.ids, part.weights)[:, :fields])
    assert (wire.unpack(message, torch.float32)[1][3:] == -1).all()


@pytest.mark.parametrize("tokens", [0, 21])
def test_places_are_those_of_a_stable_sort(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tokens than a program counts at once, and none."""
    monkeypatch.setattr(rows, "_BLOCK", 8)
    moe = virtual(weights_of(7), simulate(3), dtype=torch.float32, strategy="all_to_all", max_tokens_per_rank=21)
    part = moe.route(1, deal(make_case(tokens, 7), [tokens])[0], 1.0)
    found = Rows(moe.scheme, moe._strays).scatter(part)
    assert isinstance(moe.exchange, AllToAll)
    expected = moe.exchange._outgoing(part)
    assert found.counts.tolist() == expected.sent
    order = [(found.places[:, rank] >= 0).nonzero()[:, 0] for rank in range(3)]
    assert torch.equal(torch.cat(order), expected.token)
    for rank, count in enumerate(expected.sent):
        assert torch.equal(found.places[order[rank], rank], torch.arange(count, dtype=torch.int32))


@pytest.mark.parametrize("strategy", KINDS)
def test_strays_become_minus_one_and_are_counted(strategy: str) -> None:
    moe = with_kernels(virtual(weights_of(4), simulate(2), strategy=strategy, dtype=torch.float32))
    case = make_case(4, 4)
    case.topk_ids[0, 0], case.topk_ids[3, 1] = 2**32, -7
    parts = [moe.route(rank, tokens, 1.0) for rank, tokens in enumerate(deal(case, [2, 2]))]
    for batch in moe.dispatch(parts, 2):
        assert int(batch.call.topk_ids.max()) < 2
    assert moe.stats()["ids_out_of_range"] == 2
