"""The same token gives the same bits: alone, in a batch, elsewhere in it, beside any neighbour."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.cases import Case, random_case
from tests.triton.support import call_of, pack, weights


def part(case: Case, rows: torch.Tensor) -> Case:
    return replace(case, x=case.x[rows], topk_ids=case.topk_ids[rows], topk_weights=case.topk_weights[rows])


@pytest.mark.parametrize(("pair", "activations"), [("mxfp4-fp8", "fp8"), ("fp8-fp8", "bf16")])
def test_token_alone_permuted_and_among_nans(pair: str, activations: str) -> None:
    routed, shared = weights(pair, 3, 96, 32, 64)
    layer = pack(routed, shared, activations)
    case = random_case(40, 2, 3, 64)
    whole = layer.forward(call_of(case), folded=True)
    order = torch.randperm(40)
    assert torch.equal(layer.forward(call_of(part(case, order)), folded=True), whole[order])
    for row in (0, 17, 39):
        assert torch.equal(layer.forward(call_of(part(case, torch.tensor([row]))), folded=True), whole[row : row + 1])
    case.x[5] = torch.nan
    spoilt = layer.forward(call_of(case), folded=True)
    others = torch.arange(40) != 5
    assert torch.equal(spoilt[others], whole[others])
    assert spoilt[5].isnan().all()
