from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor, blocks, e2m1, nvfp4
from tests.support.strategies import all_bytes, weights


def test_every_byte_is_code_times_block_scale_times_global_scale() -> None:
    codes = all_bytes().repeat_interleave(8).view(256, 8)
    scales = all_bytes().view(torch.float8_e4m3fn)[:, None]
    tensor = QuantizedTensor(codes, scales, format=Format.NVFP4, global_scale=torch.tensor(0.25))
    pairs = torch.stack((all_bytes() & 15, all_bytes() >> 4), dim=-1)
    expected = e2m1.decode(pairs, torch.float64) * scales.to(torch.float64) * 0.25
    torch.testing.assert_close(tensor.dequantize(torch.float64)[:, :2], expected, rtol=0, atol=0, equal_nan=True)


@given(weights(even_columns=True))
def test_the_error_is_bounded_by_the_block_amax(weight: Tensor) -> None:
    stored = nvfp4.quantize(weight)
    assert stored.shape == weight.shape
    error = blocks.groups((nvfp4.dequantize(stored, torch.float64) - weight).abs(), 16).amax(dim=-1)
    amax = blocks.groups(weight.abs().to(torch.float64), 16).amax(dim=-1)
    smallest_step = stored.global_scale.to(torch.float64)[..., None, None] * 2.0**-9 * 6
    assert (error <= amax * 0.22 + smallest_step).all()


@given(weights(even_columns=True))
def test_the_largest_number_of_every_matrix_comes_back(weight: Tensor) -> None:
    back = nvfp4.quantize(weight).dequantize(torch.float64)
    amax = weight.abs().amax(dim=(-1, -2)).to(torch.float64)
    torch.testing.assert_close(back.abs().amax(dim=(-1, -2)), amax, rtol=1e-6, atol=0)


def test_every_matrix_of_a_stack_has_its_own_global_scale() -> None:
    weight = torch.randn(3, 8, 32) * torch.tensor([1.0, 1e3, 1e-3])[:, None, None]
    stored = nvfp4.quantize(weight)
    assert stored.global_scale.shape == (3,)
    torch.testing.assert_close(stored.global_scale, weight.abs().amax(dim=(-1, -2)) / (6 * 448))
    for expert in range(3):
        assert torch.equal(stored[expert].dequantize(), stored.dequantize()[expert])


@pytest.mark.parametrize("amax", [0.0, 1e-44, 6e-38])
def test_tiny_and_zero_weights_stay_finite(amax: float) -> None:
    weight = torch.zeros(4, 32)
    weight[1, 1] = amax
    back = nvfp4.quantize(weight).dequantize(torch.float64)
    assert back.isfinite().all()
    assert float((back - weight).abs().max()) <= amax


def test_odd_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="K must be even, found 17"):
        nvfp4.quantize(torch.ones(4, 17))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_are_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="neither NaN nor Inf"):
        nvfp4.quantize(torch.tensor([[1.0, bad]]))
