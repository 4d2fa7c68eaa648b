"""Calls over all ranks, for ``rank_routes`` on an interpreter, a CPU and a GPU."""

from collections.abc import Iterator
from itertools import product

import torch

from foldmoe.backends import Call

FIRST, HELD, COUNT = 12, 7, 32
OWN = range(FIRST, FIRST + HELD)


def calls(device: str) -> Iterator[tuple[Call, bool]]:
    """Both kinds of ids, odd widths, ids out of range, gates, rows and padding as numbers and on the device, slots."""
    dice = torch.Generator().manual_seed(0)
    for top_k, dtype, slot, gated, rows in product(
        (0, 1, 3, 8, 17, 32),
        (torch.int32, torch.int64),
        (False, True),
        (False, True),
        ("all", "some", "device", "none"),
    ):
        tokens = 41
        wide = torch.randint(-2, COUNT + 2, (tokens, top_k + 3), dtype=dtype, generator=dice)
        weights = torch.rand(tokens, top_k + 3, generator=dice)
        gate = torch.rand(tokens, generator=dice).to(device) if gated else None
        some = {"all": None, "some": (5, 17), "none": (0, 0)}.get(
            rows, torch.tensor([3, 30], dtype=torch.int32).to(device)
        )
        valid = {"some": 30, "device": torch.tensor([17], dtype=torch.int32).to(device)}.get(rows)
        yield (
            Call(
                torch.zeros(tokens, 8).to(device),
                wide.to(device)[:, 1 : top_k + 1],
                weights.to(device)[:, 2 : top_k + 2],
                gate,
                1.5,
                valid,
                some,
            ),
            slot,
        )


def same(mine: Call, truth: Call) -> None:
    assert torch.equal(mine.topk_ids.cpu(), truth.topk_ids.cpu())
    assert mine.topk_ids.dtype == truth.topk_ids.dtype
    assert torch.equal(mine.topk_weights.cpu(), truth.topk_weights.cpu())
    assert mine.routed_scale == truth.routed_scale
    assert (mine.shared_rows is None) == (truth.shared_rows is None)
    assert (mine.shared_weights is None) == (truth.shared_weights is None)
