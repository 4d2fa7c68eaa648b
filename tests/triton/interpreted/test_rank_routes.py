"""A call's routes as one rank's: the kernel and the torch expression give the same numbers."""

from dataclasses import replace

import pytest
import torch

from foldmoe import FoldedMoE, Format, FusionPolicy
from foldmoe.backends import Call, PackedLayer
from foldmoe.backends.base import own_routes, strays
from foldmoe.backends.triton.rank_routes import rank_routes
from tests.support.cases import make_layer
from tests.triton.rank_cases import COUNT, FIRST, HELD, OWN, calls, same
from tests.triton.support import pack, weights


def test_the_kernel_equals_the_torch_expression():
    for call, slot in calls("cpu"):
        found = torch.zeros(1, dtype=torch.int64)
        truth = own_routes(call, OWN, slot)
        same(rank_routes(call, OWN, COUNT, slot, found), truth)
        assert truth.topk_ids.shape[1] == call.topk_ids.shape[1] + slot
        assert int(found) == int(strays(call, COUNT))


def test_what_the_expression_says():
    """By hand: experts 12 .. 18 of 32 here; rows 5 .. 16 get the shared expert, rows from 30 on are padding."""
    call = next(c for c, slot in calls("cpu") if slot and isinstance(c.shared_rows, tuple) and c.topk_ids.shape[1] == 3)
    found = torch.zeros(1, dtype=torch.int64)
    mine = rank_routes(call, OWN, COUNT, True, found)
    wrong = 0
    for row in range(41):
        for k in range(3):
            expert = int(call.topk_ids[row, k])
            assert mine.topk_ids[row, k] == (expert - FIRST if FIRST <= expert < FIRST + HELD else -1)
            wrong += row < 30 and not -1 <= expert < COUNT
        assert mine.topk_ids[row, 3] == (HELD if 5 <= row < 17 else -1)
    assert torch.equal(mine.topk_weights[:, :3], call.topk_weights * 1.5)
    assert COUNT > FIRST + HELD
    assert int(found) == wrong > 0


def layer_of(backend: str) -> PackedLayer:
    if backend == "triton":
        return pack(weights("bf16-bf16", 2, 32, 32, 64)[0], None, "bf16")
    routed, _ = make_layer(Format.BF16, Format.BF16, experts=2, width=32, shared_width=32, hidden=64)
    return FoldedMoE(routed, policy=FusionPolicy(backend="torch")).packed


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("experts", "slot"), [(range(2, 4), False), (range(2), True), (range(2, 4), True)])
def test_ids_out_of_range_are_counted_once(backend: str, experts: range, slot: bool) -> None:
    """Those of other ranks and of padding are none."""
    layer = layer_of(backend)
    count = 4 if experts.start else 2
    ids = torch.tensor([[0, count], [-1, -7], [1, count + 9], [-2, count]])
    call = Call(torch.zeros(4, 64, dtype=torch.bfloat16), ids, torch.ones(4, 2), num_valid_tokens=3)
    mine = layer.rank_routes(call, experts, count, slot=slot)
    assert mine.topk_ids.shape[1] == 2 + slot
    if slot:  # the packed layer here has no expert that is the slot
        mine = replace(mine, topk_ids=mine.topk_ids[:, :2], topk_weights=mine.topk_weights[:, :2])
    layer.forward(mine, folded=True)
    assert layer.stats()["ids_out_of_range"] == 3


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_ids_that_nobody_maps_are_counted_by_the_layer(backend: str) -> None:
    layer = layer_of(backend)
    ids = torch.tensor([[0, 2], [-1, -7], [1, 11], [-2, 2]])
    call = Call(torch.zeros(4, 64, dtype=torch.bfloat16), ids, torch.ones(4, 2), num_valid_tokens=3)
    assert layer.rank_routes(call, range(2), 2, slot=False) is call
    layer.forward(call, folded=True)
    assert layer.stats()["ids_out_of_range"] == 3
