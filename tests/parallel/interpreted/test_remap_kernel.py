"""The remap kernel against the torch expression."""

from __future__ import annotations

import pytest
import torch

from foldmoe.moe.slots import SlotMap, append_shared_slot
from foldmoe.parallel.remap import launch
from foldmoe.parallel.remap_kernel import BLOCK

COUNTS = ((1,), (4, 4), (3, 2, 2), (0, 5, 0, 1, 2), (7,) * 48)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 31, 32])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_every_width_and_both_integers(top_k: int, dtype: torch.dtype) -> None:
    """1 to 48 ranks, uneven and empty ones, no tokens to more than one program's, with and without gate."""
    dice = torch.Generator().manual_seed(top_k)
    for counts in (COUNTS[top_k % len(COUNTS)], COUNTS[-1]):
        slots = SlotMap(counts)
        for tokens, gated in ((0, False), (1, True), (5, False), (BLOCK // (top_k + 1) + 1, True)):
            ids = torch.randint(-1, slots.num_experts, (tokens, top_k), generator=dice, dtype=dtype)
            weights = torch.rand(tokens, top_k, generator=dice)
            gate = torch.rand(tokens, generator=dice) if gated else None
            rank = (tokens + top_k) % len(counts)
            found = launch(ids, weights, slots, rank, top_k=top_k, shared_weights=gate)
            expected = append_shared_slot(
                ids, weights, experts_per_rank=counts, rank=rank, top_k=top_k, shared_weights=gate
            )
            for mine, truth in zip(found, expected, strict=True):
                assert mine.dtype == truth.dtype
                assert torch.equal(mine, truth)


def test_strays_become_minus_one_and_are_counted() -> None:
    strays = torch.zeros(1, dtype=torch.int64)
    ids = torch.tensor([[0, 9, -1], [-7, 3, 8]])
    found, _ = launch(ids, torch.ones(2, 3), SlotMap((4, 4)), 1, top_k=3, strays=strays)
    assert found.tolist() == [[0, -1, -1, 9], [-1, 3, -1, 9]]
    assert strays.tolist() == [3]


def test_columns_of_a_wider_tensor() -> None:
    ids, weights = torch.tensor([[0, 1, 9], [3, 2, 9]])[:, :2], torch.rand(2, 3)[:, :2]
    found, kept = launch(ids, weights, SlotMap((2, 2)), 0, top_k=2)
    assert found.tolist() == [[0, 1, 2], [4, 3, 2]]
    assert torch.equal(kept[:, :2], weights)
