"""Every pair of formats, widths that no tile divides, and batches around the tile sizes, against the oracle."""

from __future__ import annotations

import pytest
import torch

from tests.support.cases import assert_close, random_case
from tests.triton.support import PAIRS, TOLERANCE, call_of, expected, pack, weights

SHAPES = ((1, 32, 64, 64), (2, 288, 32, 32), (7, 64, 320, 96), (17, 96, 96, 160), (7, 192, 192, 64))
"""(tokens, routed width, shared width, hidden)"""

RUNS = [
    (pair, activations, *SHAPES[(i + j) % len(SHAPES)])
    for i, pair in enumerate(PAIRS)
    for j, activations in enumerate(("bf16", "fp8"))
]


@pytest.mark.parametrize(("pair", "activations", "tokens", "width", "shared_width", "hidden"), RUNS)
def test_folded_matches_the_oracle_and_serial(
    pair: str, activations: str, tokens: int, width: int, shared_width: int, hidden: int
) -> None:
    routed, shared = weights(pair, 4, width, shared_width, hidden)
    layer = pack(routed, shared, activations)
    case = random_case(tokens, 2, 4, hidden)
    folded = layer.forward(call_of(case), folded=True)
    assert_close(folded, expected(case, routed, shared, activations), TOLERANCE[activations])
    assert torch.equal(folded, layer.forward(call_of(case), folded=False))


@pytest.mark.parametrize("pair", ["mxfp4-fp8", "bf16-bf16"])
def test_one_scale_a_token(pair: str) -> None:
    routed, shared = weights(pair, 4, 192, 64, 160)
    case = random_case(5, 2, 4, 160)
    y = pack(routed, shared, "fp8_token").forward(call_of(case), folded=True)
    assert_close(y, expected(case, routed, shared, "fp8_token"), TOLERANCE["fp8_token"])


def test_several_tiles_of_tokens() -> None:
    routed, shared = weights("mxfp4-mxfp4", 2, 32, 32, 64)
    case = random_case(65, 1, 2, 64)
    y = pack(routed, shared, "fp8").forward(call_of(case), folded=True)
    assert_close(y, expected(case, routed, shared, "fp8"), TOLERANCE["fp8"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_of_x(dtype: torch.dtype) -> None:
    routed, shared = weights("mxfp4-fp8", 4, 64, 32, 64)
    case = random_case(3, 2, 4, 64, dtype=dtype)
    y = pack(routed, shared, "bf16").forward(call_of(case), folded=True)
    assert y.dtype == dtype
    assert_close(y, expected(case, routed, shared, "bf16"), TOLERANCE["bf16"])


def test_tensor_parallel_shards_are_read_through_their_strides() -> None:
    routed, shared = weights("mxfp4-fp8", 4, 192, 384, 64)
    for rank in range(2):
        mine, common = routed.shard(rank, 2), shared.shard(rank, 2)
        case = random_case(3, 2, 4, 64)
        y = pack(mine, common, "fp8").forward(call_of(case), folded=True)
        assert_close(y, expected(case, mine, common, "fp8"), TOLERANCE["fp8"])


def test_gate_and_up_are_not_exchanged() -> None:
    routed, shared = weights("bf16-bf16", 2, 32, 32, 32)
    for experts in (routed, shared):
        experts.gate_up.values[:, :32] *= 3
    case = random_case(2, 1, 2, 32)
    y = pack(routed, shared, "bf16").forward(call_of(case), folded=True)
    assert_close(y, expected(case, routed, shared, "bf16"), TOLERANCE["bf16"])
