"""Results in the order of routes, with the kernels of a real backend: the same bits for any number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.formats import Format
from foldmoe.parallel import simulate
from foldmoe.reference import reference_moe
from tests.parallel.support import deal, virtual
from tests.support.cases import BF16_TOLERANCE, FP8_TOLERANCE, assert_close, make_layer, random_case

if TYPE_CHECKING:
    from collections.abc import Sequence

EXPERTS, HIDDEN, TOKENS, TOP_K = 3, 128, 5, 2
TOLERANCE = {"bf16": BF16_TOLERANCE, "fp8": FP8_TOLERANCE}


@pytest.mark.parametrize(("fold", "activations"), [("native", "fp8"), ("native", "bf16"), ("slot", "fp8")])
def test_any_number_of_ranks_gives_the_bits_of_one(fold: str, activations: Any) -> None:
    """Ranks hold two experts, one or none of the routes, and the tokens of all, some or none."""
    weights = make_layer(Format.MXFP4, Format.MXFP4 if fold == "slot" else Format.FP8_32x32, EXPERTS, 32, 32, HIDDEN)
    case = random_case(TOKENS, TOP_K, EXPERTS, HIDDEN, dtype=torch.float32)
    options: dict[str, Any] = {
        "strategy": "all_to_all",
        "order": "route",
        "dtype": torch.float32,
        "backend": "triton",
        "activations": activations,
        "top_k": TOP_K,
    }

    def run(counts: Sequence[int]) -> torch.Tensor:
        moe = virtual(weights, simulate(len(counts)), fold, **options)
        assert {layer.plan.backend for layer in moe.local_layers} == {"triton"}
        return torch.cat(moe.forward_ranks(deal(case, counts)))

    alone = run([TOKENS])
    assert_close(alone, reference_moe(*case.args, *weights, activations=activations), TOLERANCE[activations])
    for counts in ([4, 1], [0, 2, 3]):
        assert torch.equal(run(counts), alone), counts
