"""NaN bytes are refused by tensor name and index."""

from __future__ import annotations

import pytest
import torch

from foldmoe.formats import Format, QuantizedTensor, refuse_nan
from foldmoe.formats.checks import nan_positions
from tests.support.cases import quantize
from tests.support.strategies import FP8_FORMATS


def stored(format: Format, **options: bool) -> QuantizedTensor:
    """A matrix whose storage the test may write to."""
    return quantize(torch.randn(64, 64), format, **options)


@pytest.mark.parametrize("format", Format)
def test_finite_tensors_pass(format: Format) -> None:
    refuse_nan(stored(format), "w")


@pytest.mark.parametrize("format", FP8_FORMATS)
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_a_nan_value_is_refused_by_name_and_first_index(format: Format, byte: int) -> None:
    tensor = stored(format)
    tensor.values.view(torch.uint8)[3, 1] = byte
    tensor.values.view(torch.uint8)[9, 9] = byte
    with pytest.raises(
        ValueError, match=rf"^layers.1.w2: 2 NaN or Inf, the first at \[3, 1\]; expected finite {format.value}"
    ):
        refuse_nan(tensor, "layers.1.w2")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("format", [Format.MXFP4, *FP8_FORMATS])
def test_an_e8m0_scale_of_255_is_refused(format: Format, dtype: torch.dtype) -> None:
    tensor = stored(format, e8m0_scales=True)
    scales = tensor.scales.view(torch.uint8).clone()
    scales[0, -1] = 255
    bad = QuantizedTensor(tensor.values, scales.view(dtype), format=format)
    with pytest.raises(ValueError, match=rf"w \(scales\): 1 NaN or Inf, the first at \[0, {scales.shape[1] - 1}\]"):
        refuse_nan(bad, "w")
    with pytest.raises(ValueError, match=r"^w\.scale: 1 NaN"):
        refuse_nan(bad, "w", "w.scale")


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_in_float_scales_and_values_are_refused(bad: float) -> None:
    tensor = stored(Format.FP8_128x128)
    tensor.scales[0, 0] = bad
    with pytest.raises(ValueError, match=r"w.weight_scale_inv: 1 NaN or Inf, the first at \[0, 0\]"):
        refuse_nan(tensor, "w.weight", "w.weight_scale_inv")
    plain = stored(Format.BF16)
    plain.values[2, 5] = bad
    with pytest.raises(ValueError, match=r"w.weight: 1 NaN or Inf, the first at \[2, 5\]"):
        refuse_nan(plain, "w.weight")


def test_nvfp4_block_scales_and_global_scale_are_looked_at() -> None:
    tensor = stored(Format.NVFP4)
    tensor.scales.view(torch.uint8)[4, 2] = 0x7F
    with pytest.raises(ValueError, match=r"w.scale: 1 NaN or Inf, the first at \[4, 2\]"):
        refuse_nan(tensor, "w", "w.scale")
    tensor = stored(Format.NVFP4)
    tensor.global_scale.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"w \(global_scale\): 1 NaN or Inf"):
        refuse_nan(tensor, "w", "w.scale")


def test_no_code_of_packed_values_is_nan() -> None:
    assert len(nan_positions(torch.arange(256, dtype=torch.uint8).view(2, 128))) == 0


def test_an_expert_of_a_stack_is_part_of_the_index() -> None:
    tensor = quantize(torch.randn(3, 32, 32), Format.MXFP8)
    tensor.values.view(torch.uint8)[2, 1, 0] = 0x7F
    with pytest.raises(ValueError, match=r"the first at \[2, 1, 0\]"):
        refuse_nan(tensor, "experts.w13")
