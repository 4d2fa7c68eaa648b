"""A call's routes as one rank's: the kernel and the torch expression give the same numbers."""

import torch

from foldmoe.backends import PackedLayer
from foldmoe.backends.triton.rank_routes import rank_routes
from tests.triton.rank_cases import COUNT, FIRST, HELD, calls, same


def test_the_kernel_equals_the_torch_expression():
    for call, slot in calls("cpu"):
        truth = PackedLayer._rank_routes(None, call, FIRST, HELD, slot)
        same(rank_routes(call, FIRST, HELD, slot), truth)
        assert truth.topk_ids.shape[1] == call.topk_ids.shape[1] + slot


def test_what_the_expression_says():
    """By hand: experts 12 .. 18 of 32 here; rows 5 .. 16 get the shared expert."""
    call = next(c for c, slot in calls("cpu") if slot and isinstance(c.shared_rows, tuple) and c.topk_ids.shape[1] == 3)
    mine = rank_routes(call, FIRST, HELD, True)
    for row in range(41):
        for k in range(3):
            expert = int(call.topk_ids[row, k])
            assert mine.topk_ids[row, k] == (expert - FIRST if FIRST <= expert < FIRST + HELD else -1)
        assert mine.topk_ids[row, 3] == (HELD if 5 <= row < 17 else -1)
    assert torch.equal(mine.topk_weights[:, :3], call.topk_weights * 1.5)
    assert COUNT > FIRST + HELD
