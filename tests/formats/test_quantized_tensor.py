from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor, e2m1, e8m0
from tests.support.cases import quantize
from tests.support.strategies import FP8_FORMATS, QUANTIZED_FORMATS, all_bytes, weights

E4M3 = torch.float8_e4m3fn


def element_by_element(tensor: QuantizedTensor) -> Tensor:
    """Dequantise one matrix the slow way."""
    rows, columns = tensor.shape
    out = torch.zeros(rows, columns, dtype=torch.float64)
    for n in range(rows):
        for k in range(columns):
            scale = tensor.scales[n // tensor.block[0], k // tensor.block[1]]
            factor = e8m0.decode(scale, torch.float64) if tensor.e8m0_scales else scale.to(torch.float64)
            if tensor.format.packed:
                byte = int(e2m1.as_bytes(tensor.values)[n, k // 2])
                value = e2m1.decode(torch.tensor(byte >> 4 if k % 2 else byte & 15), torch.float64)
            else:
                value = tensor.values[n, k].to(torch.float64)
            out[n, k] = value * factor * (1 if tensor.global_scale is None else tensor.global_scale.to(torch.float64))
    return out


@pytest.mark.parametrize("format", QUANTIZED_FORMATS)
@pytest.mark.parametrize("shape", [(3, 34), (33, 6), (130, 4)])
def test_dequantize_multiplies_every_value_by_the_scale_of_its_block(format: Format, shape: tuple[int, int]) -> None:
    stored = quantize(torch.randn(shape), format)
    assert torch.equal(stored.dequantize(torch.float64), element_by_element(stored))


@pytest.mark.parametrize("byte", [0, 1, 127, 200, 254])
@pytest.mark.parametrize("format", FP8_FORMATS)
def test_every_fp8_byte_times_a_one_byte_scale(format: Format, byte: int) -> None:
    values = all_bytes().view(8, 32).view(E4M3)
    rows = 8 if format is Format.MXFP8 else 1
    tensor = QuantizedTensor(values, torch.full((rows, 1), byte, dtype=torch.uint8), format=format)
    expected = values.to(torch.float64) * 2.0 ** (byte - 127)
    torch.testing.assert_close(tensor.dequantize(torch.float64), expected, rtol=0, atol=0, equal_nan=True)


@given(weights(even_columns=True), st.sampled_from(QUANTIZED_FORMATS))
def test_bf16_and_float32_results_are_rounded_once(weight: Tensor, format: Format) -> None:
    stored = quantize(weight, format, e8m0_scales=True if format.fp8 else None)
    exact = stored.dequantize(torch.float64)
    if format is not Format.NVFP4:  # whose block scale * global scale is rounded to float32 first
        assert torch.equal(stored.dequantize(torch.float32), exact.to(torch.float32))
        assert torch.equal(stored.dequantize(torch.bfloat16), exact.to(torch.bfloat16))
    else:
        torch.testing.assert_close(stored.dequantize().to(torch.float64), exact, rtol=2.0**-22, atol=0)


@pytest.mark.parametrize("scales", [torch.uint8, torch.int8, torch.float8_e8m0fnu])
@pytest.mark.parametrize("format", [*FP8_FORMATS, Format.MXFP4])
def test_one_byte_scales_read_alike_and_never_as_integers(format: Format, scales: torch.dtype) -> None:
    stored = quantize(torch.randn(64, 64), format, e8m0_scales=True)
    again = QuantizedTensor(stored.values, stored.scales.view(torch.uint8).view(scales), format=format)
    assert again.e8m0_scales
    assert torch.equal(again.dequantize(), stored.dequantize())


@pytest.mark.parametrize("values", [torch.int8, torch.float4_e2m1fn_x2])
@pytest.mark.parametrize("format", [Format.MXFP4, Format.NVFP4])
def test_packed_values_read_alike(format: Format, values: torch.dtype) -> None:
    stored = quantize(torch.randn(4, 64), format)
    again = QuantizedTensor(stored.values.view(values), stored.scales, format=format, global_scale=stored.global_scale)
    assert again.shape == (4, 64)
    assert torch.equal(again.dequantize(), stored.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_floats_come_back_as_they_are(dtype: torch.dtype) -> None:
    values = torch.randn(5, 7).to(dtype)
    tensor = QuantizedTensor(values, format=Format.BF16)
    assert torch.equal(tensor.dequantize(torch.float64), values.to(torch.float64))
    assert not tensor.e8m0_scales
    with pytest.raises(ValueError, match="bf16 has no scales"):
        tensor.scale_values()


def fp8(rows: int, columns: int, scales: tuple[int, ...], **changes: Any) -> QuantizedTensor:
    options: dict[str, Any] = {"scales": torch.ones(scales), "format": Format.FP8_128x128, **changes}
    return QuantizedTensor(torch.zeros(rows, columns).to(E4M3), **options)


@pytest.mark.parametrize("wrong", [(2, 2), (1, 3), (2, 4), (3, 2), (1, 2, 3)])
def test_scales_of_the_wrong_shape_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"fp8_128x128 \[200, 300\] with 128x128 blocks needs scales \[2, 3\], found"):
        fp8(200, 300, wrong)


def test_a_stack_of_scales_must_match_the_stack_of_values() -> None:
    with pytest.raises(ValueError, match=r"needs scales \[3, 4, 2\], found \[2, 4, 2\]"):
        QuantizedTensor(
            torch.zeros(3, 4, 32, dtype=torch.uint8), torch.zeros(2, 4, 2, dtype=torch.uint8), format=Format.MXFP4
        )


@pytest.mark.parametrize("format", Format)
def test_missing_and_superfluous_scales_are_refused(format: Format) -> None:
    stored = quantize(torch.randn(32, 32), format)
    scales = torch.ones(1, 1) if format is Format.BF16 else None
    with pytest.raises(ValueError, match="takes no scales" if format is Format.BF16 else "needs scales"):
        QuantizedTensor(stored.values, scales, format=format, global_scale=stored.global_scale)


@pytest.mark.parametrize("format", Format)
def test_only_nvfp4_has_a_global_scale(format: Format) -> None:
    stored = quantize(torch.randn(32, 32), format)
    wrong = None if format is Format.NVFP4 else torch.tensor(1.0)
    with pytest.raises(ValueError, match="needs global_scale" if wrong is None else "takes no global_scale"):
        QuantizedTensor(stored.values, stored.scales, format=format, global_scale=wrong)


@pytest.mark.parametrize(
    ("values", "scales", "format", "message"),
    [
        (torch.uint8, None, Format.BF16, "bf16 values must be one of.*found uint8"),
        (torch.uint8, torch.float32, Format.FP8_128x128, "fp8_128x128 values must be one of.*found uint8"),
        (E4M3, torch.uint8, Format.MXFP4, "mxfp4 values must be one of.*found float8_e4m3fn"),
        (torch.uint8, torch.float32, Format.MXFP4, "mxfp4 scales must be one of.*found float32"),
        (torch.uint8, torch.uint8, Format.NVFP4, "nvfp4 scales must be one of.*found uint8"),
        (E4M3, torch.int32, Format.FP8_128x128, "fp8_128x128 scales must be one of.*found int32"),
        (E4M3, torch.float32, Format.MXFP8, "mxfp8 scales must be one of.*found float32"),
    ],
)
def test_dtypes_that_a_format_does_not_use_are_refused(
    values: torch.dtype, scales: torch.dtype | None, format: Format, message: str
) -> None:
    stored_scales = None if scales is None else torch.zeros(1, 1, dtype=scales)
    global_scale = torch.tensor(1.0) if format is Format.NVFP4 else None
    with pytest.raises(TypeError, match=message):
        QuantizedTensor(torch.zeros(1, 16, dtype=values), stored_scales, format=format, global_scale=global_scale)


def test_a_vector_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"expected a matrix or a stack of matrices, found shape \[4\]"):
        QuantizedTensor(torch.zeros(4), format=Format.BF16)


def nvfp4_stack(global_scale: Tensor) -> QuantizedTensor:
    return QuantizedTensor(
        torch.full((3, 4, 8), 0x22, dtype=torch.uint8),
        torch.ones(3, 4, 1).to(E4M3),
        format=Format.NVFP4,
        global_scale=global_scale,
    )


def test_a_global_scale_may_stand_for_all_matrices_for_each_or_for_ranges_of_rows() -> None:
    assert (nvfp4_stack(torch.tensor(2.0)).dequantize() == 2).all()
    each = nvfp4_stack(torch.tensor([1.0, 2.0, 3.0]))
    assert each.dequantize()[:, 0, 0].tolist() == [1, 2, 3]
    halves = nvfp4_stack(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    assert halves.dequantize()[:, :, 0].tolist() == [[1, 1, 2, 2], [3, 3, 4, 4], [5, 5, 6, 6]]
    assert halves[1].dequantize()[:, 0].tolist() == [3, 3, 4, 4]


@pytest.mark.parametrize(
    ("global_scale", "error", "message"),
    [
        (torch.tensor(1.0, dtype=torch.float64), TypeError, "must be float32, found float64"),
        (torch.ones(2), ValueError, r"must be \[\] or \[3\], found \[2\]"),
        (torch.ones(3, 1, 1), ValueError, r"must be \[\] or \[3\], found \[3, 1, 1\]"),
        (torch.ones(3, 3), ValueError, "4 rows do not divide into 3 ranges"),
    ],
)
def test_other_global_scales_are_refused(global_scale: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        nvfp4_stack(global_scale)


@pytest.mark.parametrize("format", Format)
def test_nbytes_counts_every_stored_tensor(format: Format) -> None:
    stored = quantize(torch.randn(2, 160, 96), format)
    assert stored.nbytes == sum(t.numel() * t.element_size() for t in stored.tensors().values())
    expected_roles = {"values"} | ({"scales"} if format is not Format.BF16 else set())
    assert set(stored.tensors()) == expected_roles | ({"global_scale"} if format is Format.NVFP4 else set())


@pytest.mark.parametrize("format", Format)
def test_indexing_picks_matrices_without_a_copy(format: Format) -> None:
    stored = quantize(torch.randn(4, 64, 64), format)
    dense = stored.dequantize()
    assert torch.equal(stored[2].dequantize(), dense[2])
    assert torch.equal(stored[1:3].dequantize(), dense[1:3])
    assert stored[2].values.data_ptr() == stored.values[2].data_ptr()
    with pytest.raises(ValueError, match="this tensor holds one matrix"):
        stored[2][0]


def test_one_global_scale_for_a_whole_stack_survives_indexing() -> None:
    assert (nvfp4_stack(torch.tensor(2.0))[1].dequantize() == 2).all()


@pytest.mark.parametrize("format", Format)
def test_to_moves_every_part(format: Format) -> None:
    moved = quantize(torch.randn(4, 32), format).to("meta")
    assert moved.device.type == "meta"
    assert {t.device.type for t in moved.tensors().values()} == {"meta"}


def test_a_finer_block_than_the_formats_own_is_read_as_such() -> None:
    tensor = fp8(128, 192, (2, 3), block=(64, 64))
    assert tensor.block == (64, 64)
    with pytest.raises(ValueError, match="with 64x64 blocks needs scales"):
        fp8(128, 192, (1, 2), block=(64, 64))
