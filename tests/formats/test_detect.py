"""Which format a stored matrix is in, from dtypes and shapes alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor, blocks
from foldmoe.formats.tensor import detect
from tests.support.cases import quantize
from tests.support.strategies import QUANTIZED_FORMATS, weights

BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)
E4M3 = torch.float8_e4m3fn


@given(weights(even_columns=True), st.sampled_from(Format))
def test_every_format_is_found_again(weight: Tensor, format: Format) -> None:
    stored = quantize(weight, format)
    found = Format.detect(stored.values, stored.scales, stored.shape)
    one_block = weight.shape[-2] <= 32 and weight.shape[-1] <= 32
    if weight.shape[-2] > 1 and not one_block:
        assert found is format
    again = QuantizedTensor(stored.values, stored.scales, format=found, global_scale=stored.global_scale)
    assert torch.equal(again.dequantize(), stored.dequantize())


@pytest.mark.parametrize("values", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize("scales", BYTE_DTYPES)
def test_mxfp4_is_found_whatever_one_byte_dtype_it_came_in(values: torch.dtype, scales: torch.dtype) -> None:
    assert detect(values, (64, 32), scales, (64, 2), (64, 64)) is Format.MXFP4


@pytest.mark.parametrize("values", [torch.uint8, torch.int8, torch.float4_e2m1fn_x2])
def test_nvfp4_is_told_from_mxfp4_by_its_e4m3_scales(values: torch.dtype) -> None:
    assert detect(values, (64, 32), E4M3, (64, 4), (64, 64)) is Format.NVFP4
    with pytest.raises(ValueError, match="fit no format"):
        detect(values, (64, 32), torch.uint8, (64, 4), (64, 64))


@pytest.mark.parametrize("scales", [*BYTE_DTYPES, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "expected"), [((2, 3), Format.FP8_128x128), ((8, 9), Format.FP8_32x32)], ids=["128x128", "32x32"]
)
def test_fp8_block_sizes_are_told_apart_by_the_scales_shape(
    scales: torch.dtype, shape: tuple[int, int], expected: Format
) -> None:
    assert detect(E4M3, (256, 288), scales, shape, (256, 288)) is expected


def test_mxfp8_needs_one_byte_scales() -> None:
    assert detect(E4M3, (256, 288), torch.uint8, (256, 9), (256, 288)) is Format.MXFP8
    with pytest.raises(ValueError, match="fit no format"):
        detect(E4M3, (256, 288), torch.float32, (256, 9), (256, 288))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_floats_are_bf16_and_take_no_scales(dtype: torch.dtype) -> None:
    assert detect(dtype, (4, 6), None, None, (4, 6)) is Format.BF16
    with pytest.raises(ValueError, match=r"take no scales, found scales \[1, 1\]"):
        detect(dtype, (4, 6), torch.float32, (1, 1), (4, 6))


def test_where_shapes_are_ambiguous_every_candidate_reads_the_same_numbers() -> None:
    values = torch.randn(32, 24).to(E4M3)
    scales = torch.tensor([[130]], dtype=torch.uint8)
    assert Format.detect(values, scales, (32, 24)) is Format.FP8_128x128
    readings = [QuantizedTensor(values, scales, format=f).dequantize() for f in (Format.FP8_128x128, Format.FP8_32x32)]
    assert torch.equal(*readings)


def test_the_message_lists_what_each_candidate_would_have_needed() -> None:
    with pytest.raises(
        ValueError, match=r"float8_e8m0fnu \[7, 7\].*fp8_128x128 \[2, 3\], fp8_32x32 \[8, 9\], mxfp8 \[256, 9\]"
    ):
        detect(E4M3, (256, 288), torch.float8_e8m0fnu, (7, 7), (256, 288))


def test_quantised_values_without_scales_are_refused() -> None:
    with pytest.raises(ValueError, match=r"uint8 values of shape \[64, 32\] need a scale tensor"):
        detect(torch.uint8, (64, 32), None, None, (64, 64))


@pytest.mark.parametrize(
    ("dtype", "stored", "logical", "message"),
    [
        (torch.bfloat16, (4, 6), (4, 8), r"found shape \[4, 6\], expected \[..., 4, 8\]"),
        (E4M3, (4, 6), (6, 4), r"FP8 values: found shape \[4, 6\]"),
        (
            torch.uint8,
            (64, 64),
            (64, 64),
            r"packed 4-bit values \(two a byte\): found shape \[64, 64\], expected \[..., 64, 32\]",
        ),
        (torch.uint8, (64, 32), (64, 65), "K must be even"),
    ],
)
def test_values_of_the_wrong_shape_are_refused(
    dtype: torch.dtype, stored: tuple[int, int], logical: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        detect(dtype, stored, *((None, None) if dtype == torch.bfloat16 else (torch.uint8, (1, 1))), logical)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.float8_e5m2])
def test_dtypes_that_no_format_uses_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="no stored format uses"):
        detect(dtype, (4, 4), None, None, (4, 4))


def test_stacks_are_detected_like_one_matrix() -> None:
    assert (
        Format.detect(torch.zeros(5, 64, 32, dtype=torch.int8), torch.zeros(5, 64, 2, dtype=torch.uint8), (5, 64, 64))
        is Format.MXFP4
    )


@pytest.mark.parametrize("format", QUANTIZED_FORMATS)
def test_a_format_knows_its_block(format: Format) -> None:
    rows, columns = 200, 320
    stored = quantize(torch.randn(rows, columns), format)
    assert tuple(stored.scales.shape) == blocks.scale_shape(rows, columns, format.block)
    assert stored.values.shape == (rows, columns // 2 if format.packed else columns)
    assert (stored.values.dtype == E4M3) == format.fp8
