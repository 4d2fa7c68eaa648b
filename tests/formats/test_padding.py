from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor, pad_intermediate
from foldmoe.moe import Activation, ExpertWeights
from foldmoe.reference import Precision, reference_moe
from tests.support.cases import ODD_WIDTHS, TINY, make_experts, make_layer, quantize, random_case
from tests.support.strategies import QUANTIZED_FORMATS

HIDDEN = 64


def pair(experts: ExpertWeights) -> tuple[QuantizedTensor, QuantizedTensor]:
    return experts.gate_up, experts.down


def next_width(width: int, format: Format) -> int:
    step = max(format.block)
    return -(-(width + 1) // step) * step


def in_order(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """x @ weight.T in float64, summed from the first column to the last."""
    return (x[:, None, :] * weight.dequantize(torch.float64)[None]).cumsum(dim=-1)[..., -1]


def expert_in_order(x: Tensor, experts: ExpertWeights) -> Tensor:
    gate, up = in_order(x.to(torch.float64), experts.gate_up[0]).chunk(2, dim=-1)
    return in_order(Activation()(gate, up), experts.down[0])


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_padding_keeps_every_bit_of_the_layers_result(format: Format, width: int) -> None:
    experts = make_experts(format, 1, width, HIDDEN)
    x = torch.randn(3, HIDDEN)
    before, after = (expert_in_order(x, e) for e in (experts, experts.padded(next_width(width, format))))
    assert torch.equal(before, after)


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("width", ODD_WIDTHS)
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
def test_the_reference_sees_no_difference_either(format: Format, width: int, activations: Precision) -> None:
    routed, shared = make_layer(format, format, 2, width, width, HIDDEN)
    wide = next_width(width, format)
    case = random_case(3, 1, 2, HIDDEN)
    before = reference_moe(*case.args, routed, shared, activations=activations)
    after = reference_moe(*case.args, routed.padded(wide), shared.padded(wide), activations=activations)
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-14)  # a matrix product may sum in another order


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_padding_adds_zeros_and_changes_nothing_else(format: Format, width: int) -> None:
    experts = make_experts(format, 3, width, HIDDEN)
    wide = next_width(width, format)
    padded = experts.padded(wide)
    assert padded.width == wide
    for old, new in zip((*experts.gate_and_up(), experts.down), (*padded.gate_and_up(), padded.down), strict=True):
        rows, columns = old.shape[-2:]
        dense = new.dequantize(torch.float64)
        assert torch.equal(dense[..., :rows, :columns], old.dequantize(torch.float64))
        assert (dense[..., rows:, :] == 0).all()
        assert (dense[..., columns:] == 0).all()


@pytest.mark.parametrize("format", QUANTIZED_FORMATS)
def test_new_scales_are_one_in_their_own_storage(format: Format) -> None:
    gate_up, down = pad_intermediate(*pair(make_experts(format, 1, 128, HIDDEN)), 384)
    for scales, half in (
        (gate_up.scales.chunk(2, dim=-2)[0], -2),
        (gate_up.scales.chunk(2, dim=-2)[1], -2),
        (down.scales, -1),
    ):
        old = scales.shape[half] // 3
        fresh = scales.narrow(half, old, 2 * old)
        one = {torch.float32: 1.0, torch.float8_e8m0fnu: 127, torch.float8_e4m3fn: 0x38}[fresh.dtype]
        stored = fresh if fresh.dtype == torch.float32 else fresh.view(torch.uint8)
        assert (stored == one).all()


def test_a_tiny_block_survives_padding() -> None:
    experts = make_experts(Format.MXFP4, 1, 40, HIDDEN, tiny_block=True)
    dense = experts.padded(64).gate_up.dequantize(torch.float64)
    assert 0 < float(dense[0, 0, :32].abs().max()) <= 2 * TINY


def test_one_matrix_pads_like_a_stack() -> None:
    experts = make_experts(Format.MXFP4, 2, 40, HIDDEN)
    alone = pad_intermediate(experts.gate_up[1], experts.down[1], 64)
    stacked = pad_intermediate(*pair(experts), 64)
    for one, many in zip(alone, stacked, strict=True):
        assert torch.equal(one.dequantize(), many.dequantize()[1])


@pytest.mark.parametrize(
    ("format", "width", "to", "message"),
    [
        (Format.BF16, 40, 39, "cannot pad a width of 40 down to 39"),
        (Format.FP8_128x128, 128, 200, "no multiple of its 128-row scale blocks"),
        (Format.MXFP4, 40, 41, "2 values in a byte"),
    ],
)
def test_widths_that_cannot_be_padded_to_are_refused(format: Format, width: int, to: int, message: str) -> None:
    experts = make_experts(format, 1, width, HIDDEN)
    with pytest.raises(ValueError, match=message):
        pad_intermediate(*pair(experts), to)


def test_matrices_that_do_not_belong_together_are_refused() -> None:
    gate_up, down = (quantize(torch.randn(1, *shape), Format.BF16) for shape in ((80, 64), (64, 32)))
    with pytest.raises(ValueError, match=r"gate_up \[1, 80, 64\] and down \[1, 64, 32\] do not belong together"):
        pad_intermediate(gate_up, down, 64)
