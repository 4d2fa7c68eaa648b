"""The shared expert as one more routed expert."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foldmoe.formats import Format, mxfp4
from foldmoe.moe import ExpertWeights
from foldmoe.moe.merge import append_expert, slot_weights
from tests.support.cases import make_experts, make_layer

HIDDEN = 96


@pytest.mark.parametrize("format", Format)
def test_the_appended_expert_is_the_last_and_the_others_stay(format: Format) -> None:
    routed, shared = make_layer(format, format, 3, 64, 64, HIDDEN)
    joined = append_expert(routed, shared)
    assert joined.num_experts == 4
    for found, mine, other in (
        (joined.gate_up, routed.gate_up, shared.gate_up),
        (joined.down, routed.down, shared.down),
    ):
        assert torch.equal(found.dequantize(), torch.cat((mine.dequantize(), other.dequantize())))


@pytest.mark.parametrize(
    ("extra", "what"),
    [
        (make_experts(Format.MXFP4, 1, 32, HIDDEN), "shape"),
        (make_experts(Format.BF16, 1, 64, HIDDEN), "format"),
    ],
)
def test_an_expert_of_another_kind_is_refused(extra: ExpertWeights, what: str) -> None:
    routed = make_experts(Format.MXFP4, 2, 64, HIDDEN)
    with pytest.raises(ValueError, match=f"slot: the shared expert is no routed expert: .*different {what}"):
        append_expert(routed, extra)


def test_wider_floats_never_widen_the_routed_experts() -> None:
    routed, shared = make_layer(Format.BF16, Format.BF16, 2, 64, 64, HIDDEN)
    wide = ExpertWeights(*(replace(t, values=t.values.to(torch.float32)) for t in (shared.gate_up, shared.down)))
    with pytest.raises(ValueError, match=r"different values: torch\.bfloat16 and torch\.float32"):
        append_expert(routed, wide)


@pytest.mark.parametrize("width", [40, 64])
def test_slot_weights_are_requantised_and_padded_only_where_asked(width: int) -> None:
    shared = make_experts(Format.FP8_128x128, 1, width, HIDDEN)
    assert slot_weights(shared, requantize=False, padded_width=None) is shared
    lowered = slot_weights(shared, requantize=True, padded_width=128)
    assert (lowered.format, lowered.width) == (Format.MXFP4, 128)
    for half, stored in zip(lowered.gate_and_up(), shared.gate_and_up(), strict=True):
        assert torch.equal(half.dequantize()[:, :width], mxfp4.quantize(stored.dequantize()).dequantize())
        assert (half.dequantize()[:, width:] == 0).all()
    expected = mxfp4.quantize(shared.down.dequantize()).dequantize()
    assert torch.equal(lowered.down.dequantize()[..., :width], expected)
