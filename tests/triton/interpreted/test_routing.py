"""Every kind of routing and padding, both ways of sorting, and what the device is told by tensor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foldmoe.backends.triton import steps
from foldmoe.backends.triton.config import Machine, choose
from tests.support.cases import CASE_NAMES, assert_close, get_case, random_case
from tests.triton.support import TOLERANCE, call_of, expected, pack, weights

EXPERTS, HIDDEN, TOKENS, TOP_K = 4, 64, 6, 2


SORTS = {"one program": 10_000, "many programs": 0}
"""Routes up to which one program sorts them all."""


@pytest.mark.parametrize(("sort", "id_dtype"), [("one program", torch.int64), ("many programs", torch.int32)])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_case(name: str, sort: str, id_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "ONE_PROGRAM_ROUTES", SORTS[sort])
    routed, shared = weights("mxfp4-fp8", EXPERTS, 32, 64, HIDDEN)
    case = get_case(name, TOKENS, TOP_K, EXPERTS, HIDDEN, id_dtype=id_dtype)
    y = pack(routed, shared, "fp8").forward(call_of(case), folded=True)
    assert_close(y, expected(case, routed, shared, "fp8"), TOLERANCE["fp8"])


@pytest.mark.parametrize("sort", SORTS)
def test_sort_is_stable_and_tiles_cover_it(sort: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks, an expert without tokens, absent ids and ids out of range."""
    monkeypatch.setattr(steps, "ONE_PROGRAM_ROUTES", SORTS[sort])
    routed, _ = weights("bf16-bf16", 5, 32, 32, 32)
    layer = pack(routed, None, "bf16")
    tokens, top_k = 150, 4
    ids = torch.randint(-1, 7, (tokens, top_k))
    ids[ids == 3] = 2
    x = torch.zeros(tokens, 32, dtype=torch.bfloat16)
    call = call_of(replace(random_case(1, 1, 5, 32), x=x, topk_ids=ids, topk_weights=torch.ones(tokens, top_k)))
    config = choose(layer.routed, None, tokens, top_k, Machine(232448), together=False)
    step = steps.Step(layer, call, layer.routed, None, config, layer._strays)
    step.prepare()
    flat = ids.flatten()
    found = (flat >= 0) & (flat < 5)
    wanted = torch.where(found, flat, 99).argsort(stable=True)[: int(found.sum())]
    assert torch.equal(step.buffers["order"][: len(wanted)].long(), wanted)
    count = int(step.buffers["facts"][3])
    expert, start, end = step.buffers["tiles"][:, :count].long()
    assert count <= step.capacity
    assert torch.equal(
        torch.cat([torch.arange(a, b) for a, b in zip(start, end, strict=True)]), torch.arange(len(wanted))
    )
    for e, a, b in zip(expert, start, end, strict=True):
        assert b - a <= config.up.routed_tokens
        assert (flat[wanted[a:b]] == e).all()
    assert layer.stats()["ids_out_of_range"] == int((flat >= 5).sum())


@pytest.mark.parametrize("rows", [(1, 4), (0, 0), (3, 3), (5, 2), (0, 99), (9, 12)])
def test_device_tensors_say_the_same_as_numbers(rows: tuple[int, int]) -> None:
    routed, shared = weights("mxfp4-mxfp4", EXPERTS, 32, 32, HIDDEN)
    layer = pack(routed, shared, "bf16")
    case = replace(random_case(TOKENS, TOP_K, EXPERTS, HIDDEN), num_valid_tokens=4, shared_rows=rows)
    case.x[4:] = torch.nan
    by_number = layer.forward(call_of(case), folded=True)
    by_tensor = replace(
        call_of(case),
        num_valid_tokens=torch.tensor([4], dtype=torch.int32),
        shared_rows=torch.tensor(rows, dtype=torch.int32),
    )
    assert torch.equal(layer.forward(by_tensor, folded=True), by_number)
    assert (by_number[4:] == 0).all()
    if rows[0] < rows[1]:
        assert_close(by_number, expected(case, routed, shared, "bf16"), TOLERANCE["bf16"])


def test_more_rows_to_choose_for_change_tiles_and_no_bit() -> None:
    """As ranks of a group call it: for the most rows that any of them may have."""
    routed, shared = weights("mxfp4-fp8", EXPERTS, 32, 64, HIDDEN)
    layer, case = pack(routed, shared, "fp8"), random_case(TOKENS, TOP_K, EXPERTS, HIDDEN)
    alone, few = layer.forward(call_of(case), folded=True), layer.stats()["config"]
    most = replace(call_of(case), most_rows=steps.ONE_PROGRAM_ROUTES)
    assert torch.equal(layer.forward(most, folded=True), alone)
    sets, rows = (layer.routed, layer.shared), most.sized_for
    assert layer.stats()["config"] == choose(*sets, rows, TOP_K, layer.machine, together=True) != few
    layer.route_share = 1 / 8  # one of eight ranks: an eighth of the routes are its experts'
    assert torch.equal(layer.forward(most, folded=True), alone)
    assert layer.stats()["config"] == choose(*sets, rows, TOP_K / 8, layer.machine, together=True)


def test_shared_part_alone() -> None:
    routed, shared = weights("mxfp4-fp8", EXPERTS, 32, 64, HIDDEN)
    layer = pack(routed, shared, "fp8")
    case = replace(
        random_case(TOKENS, TOP_K, EXPERTS, HIDDEN),
        shared_rows=(1, 4),
        shared_weights=torch.rand(TOKENS),
        routed_scale=3.0,
    )
    alone = layer.forward_shared(call_of(case))
    none = replace(case, topk_ids=torch.full_like(case.topk_ids, -1))
    assert alone.dtype == torch.float32
    assert_close(alone, expected(none, routed, shared, "fp8"), TOLERANCE["fp8"])


def test_layer_without_a_shared_expert() -> None:
    routed, _ = weights("mxfp4-fp8", EXPERTS, 32, 64, HIDDEN)
    case = random_case(TOKENS, TOP_K, EXPERTS, HIDDEN)
    layer = pack(routed, None, "fp8")
    y = layer.forward(call_of(case), folded=True)
    assert_close(y, expected(case, routed, None, "fp8"), TOLERANCE["fp8"])
    assert (layer.forward_shared(call_of(case)) == 0).all()
