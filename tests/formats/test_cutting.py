from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor
from foldmoe.formats.cutting import append, cut, regrid, stack_rows
from tests.support.cases import quantize
from tests.support.strategies import FP8_FORMATS, QUANTIZED_FORMATS, weights


@given(st.data(), weights(even_columns=True), st.sampled_from(Format), st.sampled_from([-2, -1]))
def test_a_cut_is_the_same_slice_of_the_dequantised_matrix(
    data: st.DataObject, weight: Tensor, format: Format, dim: int
) -> None:
    stored = quantize(weight, format)
    step = 2 if dim == -1 and format.packed else 1
    size = weight.shape[dim] // step
    start = data.draw(st.integers(0, size), label="start") * step
    length = data.draw(st.integers(0, size - start // step), label="length") * step
    piece = cut(stored, dim, start, length)
    assert torch.equal(piece.dequantize(), stored.dequantize().narrow(dim, start, length))


@pytest.mark.parametrize("format", QUANTIZED_FORMATS)
def test_a_cut_between_blocks_is_a_view(format: Format) -> None:
    stored = quantize(torch.randn(2, 256, 256), format)
    for dim in (-2, -1):
        piece = cut(stored, dim, 128, 128)
        assert piece.block == format.block
        assert piece.values.untyped_storage().data_ptr() == stored.values.untyped_storage().data_ptr()
        assert piece.scales.untyped_storage().data_ptr() == stored.scales.untyped_storage().data_ptr()


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, 41), (40, 1), (30, 20)])
def test_a_cut_outside_the_matrix_is_refused(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="lies outside a dimension of 40"):
        cut(quantize(torch.randn(40, 64), Format.BF16), -2, start, length)


@pytest.mark.parametrize(("start", "length"), [(1, 2), (2, 3)])
def test_a_cut_through_a_byte_is_refused(start: int, length: int) -> None:
    with pytest.raises(ValueError, match="halve a byte of two mxfp4 values"):
        cut(quantize(torch.randn(4, 64), Format.MXFP4), -1, start, length)


@given(weights(), st.sampled_from(FP8_FORMATS))
def test_regrid_changes_no_number(weight: Tensor, format: Format) -> None:
    stored = quantize(weight, format)
    block = (min(format.block[0], 16), 8)
    fine = regrid(stored, block)
    assert fine.block == block
    assert fine.scales.dtype == stored.scales.dtype
    assert torch.equal(fine.dequantize(), stored.dequantize())


def test_regrid_to_a_coarser_or_straddling_block_is_refused() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        regrid(quantize(torch.randn(64, 64), Format.FP8_32x32), (64, 64))


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_stacked_rows_are_the_two_dequantised_matrices_one_above_the_other(
    format: Format, lead: tuple[int, ...]
) -> None:
    first, second = (quantize(torch.randn(*lead, 128, 64) * s, format) for s in (1.0, 37.0))
    stacked = stack_rows(first, second)
    assert torch.equal(stacked.dequantize(), torch.cat((first.dequantize(), second.dequantize()), dim=-2))
    assert stacked.nbytes == first.nbytes + second.nbytes
    for half, original in ((0, first), (1, second)):
        assert torch.equal(cut(stacked, -2, half * 128, 128).dequantize(), original.dequantize())


def test_rows_of_two_global_scales_do_not_come_in_one_cut() -> None:
    halves = [quantize(torch.randn(8, 32) * s, Format.NVFP4) for s in (1.0, 5.0)]
    with pytest.raises(ValueError, match=r"rows 4 \.\. 12 have two global scales, one for every 8 rows"):
        cut(stack_rows(*halves), -2, 4, 8)


def stored(rows: int, format: Format = Format.FP8_128x128, **options: bool) -> QuantizedTensor:
    return quantize(torch.randn(rows, 64), format, **options)


@pytest.mark.parametrize(
    ("second", "what"),
    [
        (stored(64), "shape"),
        (stored(128, Format.MXFP8), "format"),
        (regrid(stored(128), (64, 64)), "scale block"),
        (stored(128, e8m0_scales=True), "scales"),
    ],
)
def test_matrices_that_are_stored_differently_are_not_stacked(second: QuantizedTensor, what: str) -> None:
    with pytest.raises(ValueError, match=f"cannot join matrices of different {what}"):
        stack_rows(stored(128), second)


def test_floats_of_different_size_are_not_stacked() -> None:
    half = quantize(torch.randn(4, 4), Format.BF16)
    with pytest.raises(ValueError, match=r"different values: torch\.bfloat16 and torch\.float32"):
        stack_rows(half, replace(half, values=half.values.to(torch.float32)))


def test_a_short_block_is_not_buried_inside_a_stack() -> None:
    with pytest.raises(ValueError, match="the boundary at row 192 would cut a 128-row scale block: regrid first"):
        stack_rows(stored(192), stored(192))


@pytest.mark.parametrize("format", Format)
def test_appended_stacks_are_the_matrices_of_both(format: Format) -> None:
    first, second = (quantize(torch.randn(n, 64, 64) * n, format) for n in (3, 1))
    joined = append(first, second)
    assert torch.equal(joined.dequantize(), torch.cat((first.dequantize(), second.dequantize())))
    assert joined.nbytes == first.nbytes + second.nbytes


def with_global(count: int, global_scale: Tensor) -> QuantizedTensor:
    return replace(quantize(torch.randn(count, 8, 32), Format.NVFP4), global_scale=global_scale)


@pytest.mark.parametrize("first", [torch.tensor(2.0), torch.tensor([2.0, 3.0]), torch.tensor([[2.0, 3.0], [4.0, 5.0]])])
@pytest.mark.parametrize("second", [torch.tensor(7.0), torch.tensor([7.0]), torch.tensor([[7.0, 8.0]])])
def test_appended_stacks_keep_global_scales_of_every_kind(first: Tensor, second: Tensor) -> None:
    one, other = with_global(2, first), with_global(1, second)
    assert torch.equal(append(one, other).dequantize(), torch.cat((one.dequantize(), other.dequantize())))


def test_stacks_of_different_matrices_are_not_appended() -> None:
    first = quantize(torch.randn(2, 64, 64), Format.MXFP4)
    with pytest.raises(ValueError, match=r"different shape: \[64, 64\] and \[32, 64\]"):
        append(first, quantize(torch.randn(1, 32, 64), Format.MXFP4))
    with pytest.raises(ValueError, match="different format: mxfp4 and bf16"):
        append(first, quantize(torch.randn(1, 64, 64), Format.BF16))
