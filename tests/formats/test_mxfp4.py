from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor, blocks, e2m1, mxfp4
from tests.support.cases import TINY
from tests.support.strategies import all_bytes, weights


def squared_error(weight: Tensor, exponent: Tensor) -> Tensor:
    """Per group of 32: what quantising with 2 ** exponent costs."""
    grouped = blocks.groups(weight.to(torch.float64), 32)
    scale = torch.exp2(exponent.to(torch.float64))[..., None]
    back = e2m1.decode(e2m1.encode(grouped / scale), torch.float64) * scale
    return (back - grouped).square().sum(dim=-1)


@given(weights(even_columns=True))
def test_quantize_is_never_worse_than_the_floor_or_the_ceil_rule_in_any_block(weight: Tensor) -> None:
    stored = mxfp4.quantize(weight)
    error = blocks.groups(stored.dequantize(torch.float64) - weight, 32).square().sum(dim=-1)
    amax = blocks.groups(weight.abs().to(torch.float64), 32).amax(dim=-1).clamp_min(2.0**-120)
    floor_rule = amax.log2().floor() - 2
    ceil_rule = (amax / 6).log2().ceil()
    for rule in (floor_rule, ceil_rule):
        assert (error <= squared_error(weight, rule)).all()


def test_both_exponents_are_in_use() -> None:
    weight = torch.randn(64, 1024)
    stored = mxfp4.quantize(weight)
    floor_rule = blocks.groups(weight.abs(), 32).amax(dim=-1).log2().floor() - 2
    above = stored.scale_values().log2() - floor_rule
    assert set(above.flatten().tolist()) == {0.0, 1.0}


@given(weights(even_columns=True))
def test_quantising_what_was_dequantised_changes_no_number(weight: Tensor) -> None:
    once = mxfp4.quantize(weight)
    assert once.shape == weight.shape
    assert torch.equal(mxfp4.quantize(mxfp4.dequantize(once)).dequantize(), once.dequantize())


def test_every_byte_of_codes_and_scales_reads_as_defined() -> None:
    codes = all_bytes().repeat_interleave(16).view(256, 16)  # row b holds byte b in all 32 columns
    for byte in range(255):
        tensor = QuantizedTensor(codes, torch.full((256, 1), byte, dtype=torch.uint8), format=Format.MXFP4)
        pairs = torch.stack((all_bytes() & 15, all_bytes() >> 4), dim=-1)
        expected = e2m1.decode(pairs, torch.float64) * 2.0 ** (byte - 127)
        assert torch.equal(tensor.dequantize(torch.float64)[:, :2], expected)
        assert torch.equal(tensor.dequantize(torch.float32)[:, 30:], expected.to(torch.float32))


def test_numbers_that_the_format_holds_come_back_exactly() -> None:
    stored = QuantizedTensor(
        torch.randint(0, 256, (8, 48), dtype=torch.uint8),
        torch.randint(90, 150, (8, 3), dtype=torch.uint8),
        format=Format.MXFP4,
    )
    exact = stored.dequantize(torch.float64)
    assert torch.equal(mxfp4.quantize(exact.to(torch.float32)).dequantize(torch.float64), exact)


def test_a_zero_block_gets_a_scale_of_one() -> None:
    stored = mxfp4.quantize(torch.zeros(2, 40))
    assert stored.scales.view(torch.uint8).tolist() == [[127, 127], [127, 127]]
    assert (stored.dequantize() == 0).all()


@pytest.mark.parametrize("amax", [TINY, 2.0**-149, 3e38])
def test_extreme_magnitudes_stay_finite(amax: float) -> None:
    weight = torch.zeros(1, 32)
    weight[0, 3] = amax
    back = mxfp4.quantize(weight).dequantize(torch.float64)
    assert back.isfinite().all()
    assert abs(float(back[0, 3]) - amax) <= amax


def test_odd_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="K must be even, found 33"):
        mxfp4.quantize(torch.ones(4, 33))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="neither NaN nor Inf"):
        mxfp4.quantize(torch.tensor([[1.0, bad]]))
