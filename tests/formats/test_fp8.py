from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor, blocks, fp8
from tests.support.cases import TINY
from tests.support.strategies import FP8_FORMATS, all_bytes, weights


def block_slices(weight: Tensor, block: tuple[int, int]) -> list[tuple[int, int, Tensor]]:
    rows, columns = weight.shape[-2:]
    n, k = blocks.scale_shape(rows, columns, block)
    return [
        (i, j, weight[..., i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]])
        for i in range(n)
        for j in range(k)
    ]


def test_every_byte_reads_as_torch_casts_it() -> None:
    values = all_bytes().view(1, 256).view(torch.float8_e4m3fn)
    tensor = QuantizedTensor(values, torch.ones(1, 2), format=Format.FP8_128x128)
    torch.testing.assert_close(tensor.dequantize(), values.to(torch.float32), rtol=0, atol=0, equal_nan=True)


def test_cast_is_torchs_own_inside_the_range_and_saturates_outside() -> None:
    inside = torch.cat((torch.linspace(-448, 448, 4001), torch.logspace(-12, 2, 500)))
    assert torch.equal(fp8.cast(inside).view(torch.uint8), inside.to(torch.float8_e4m3fn).view(torch.uint8))
    outside = torch.tensor([449.0, 1e6, torch.inf, -1e6])
    assert fp8.cast(outside).to(torch.float32).tolist() == [448.0, 448.0, 448.0, -448.0]


def test_cast_gives_back_every_finite_byte() -> None:
    stored = all_bytes().view(torch.float8_e4m3fn)
    finite = ~fp8.nan_mask(stored)
    assert int(finite.sum()) == 254
    assert torch.equal(fp8.cast(stored.to(torch.float32)).view(torch.uint8)[finite], all_bytes()[finite])


def test_nan_mask_finds_exactly_7f_and_ff() -> None:
    assert fp8.nan_mask(all_bytes().view(torch.float8_e4m3fn)).nonzero().flatten().tolist() == [0x7F, 0xFF]


@given(weights(), st.sampled_from(FP8_FORMATS), st.booleans())
def test_blocks_are_scaled_by_their_own_amax_and_last_blocks_may_be_short(
    weight: Tensor, format: Format, e8m0_scales: bool
) -> None:
    e8m0_scales = e8m0_scales or format is Format.MXFP8
    stored = fp8.quantize_block(weight, format, e8m0_scales=e8m0_scales)
    assert stored.shape == weight.shape
    assert stored.e8m0_scales == e8m0_scales
    scales = stored.scale_values()
    for i, j, part in block_slices(weight, format.block):
        exact = part.abs().amax(dim=(-1, -2)) / 448
        found = scales[..., i, j]
        if e8m0_scales:
            assert ((exact <= found) & ((found < 2 * exact) | (exact == 0))).all()
        else:
            assert torch.equal(found, torch.where(exact > 0, exact, torch.ones_like(exact)))


@given(weights(), st.sampled_from(FP8_FORMATS))
def test_rounding_is_within_half_a_step_of_e4m3(weight: Tensor, format: Format) -> None:
    stored = fp8.quantize_block(weight, format)
    step = blocks.expand(stored.scale_values(torch.float64), *weight.shape[-2:], format.block)
    error = (fp8.dequantize_block(stored, torch.float64) - weight.to(torch.float64)).abs()
    allowed = torch.maximum(weight.abs().to(torch.float64) * 2.0**-4, step * 2.0**-10)
    assert (error <= allowed * (1 + 1e-6)).all()


@given(weights(), st.sampled_from(FP8_FORMATS))
def test_quantising_what_was_dequantised_changes_no_number(weight: Tensor, format: Format) -> None:
    once = fp8.quantize_block(weight, format, e8m0_scales=True).dequantize()
    assert torch.equal(fp8.quantize_block(once, format, e8m0_scales=True).dequantize(), once)


@pytest.mark.parametrize("format", FP8_FORMATS)
@pytest.mark.parametrize("amax", [TINY, 1e-44, 2.0**-149])
def test_tiny_weights_stay_finite(format: Format, amax: float) -> None:
    weight = torch.zeros(32, 64)
    weight[0, 0] = amax
    result = fp8.quantize_block(weight, format).dequantize(torch.float64)
    assert result.isfinite().all()
    assert float((result - weight).abs().max()) <= amax


def test_stored_scales_follow_the_checkpoints_own_conventions() -> None:
    weight = torch.randn(128, 128)
    assert fp8.quantize_block(weight).scales.dtype == torch.float32
    assert fp8.quantize_block(weight, Format.FP8_32x32).scales.dtype == torch.float8_e8m0fnu
    assert fp8.quantize_block(weight, Format.MXFP8).scales.dtype == torch.float8_e8m0fnu


def test_quantize_block_refuses_other_formats() -> None:
    with pytest.raises(ValueError, match="writes FP8 formats, not mxfp4"):
        fp8.quantize_block(torch.ones(4, 4), Format.MXFP4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_quantize_block_refuses_nan_and_inf(bad: float) -> None:
    with pytest.raises(ValueError, match="neither NaN nor Inf"):
        fp8.quantize_block(torch.full((4, 4), bad))


def activation_scale(amax: float) -> float:
    return 2.0 ** math.ceil(math.log2(max(amax, 1e-4) / 448))


@given(st.integers(1, 5), st.integers(1, 300), st.integers(-60, 20), st.integers(0, 2**31))
def test_activation_scales_follow_the_formula(rows: int, columns: int, exponent: int, seed: int) -> None:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    values, scales = fp8.quantize_activations(x)
    assert values.dtype == torch.float8_e4m3fn
    assert scales.shape == (rows, -(-columns // 128))
    for row in range(rows):
        for group in range(scales.shape[1]):
            part = x[row, group * 128 : (group + 1) * 128]
            expected = activation_scale(float(part.abs().max()))
            assert float(scales[row, group]) == expected
            assert torch.equal(
                values[row, group * 128 : (group + 1) * 128].to(torch.float32),
                (part / expected).to(torch.float8_e4m3fn).to(torch.float32),
            )


@pytest.mark.parametrize("exponent", [-5, 0, 7])
def test_the_activation_scale_steps_exactly_at_448_times_a_power_of_two(exponent: int) -> None:
    amax = 448 * 2.0**exponent
    above = float(torch.nextafter(torch.tensor(amax), torch.tensor(torch.inf)))
    for value, scale in ((amax, 2.0**exponent), (above, 2.0 ** (exponent + 1))):
        _, scales = fp8.quantize_activations(torch.tensor([[value, 0.0]]))
        assert float(scales) == scale


def test_amax_is_floored_at_1e_minus_4_and_tiny_rows_do_not_overflow() -> None:
    floor = activation_scale(1e-4)
    values, scales = fp8.quantize_activations(torch.tensor([[0.0, 0.0], [TINY, -TINY], [9e-5, 0.0]]))
    assert scales.flatten().tolist() == [floor] * 3
    assert values[:2].to(torch.float32).abs().max() == 0
    assert values[2, 0].to(torch.float32) == torch.tensor(9e-5 / floor).to(torch.float8_e4m3fn).to(torch.float32)


def test_zero_rows_stay_exactly_zero() -> None:
    x = torch.randn(4, 256)
    x[2] = 0.0
    result = fp8.dequantize_activations(*fp8.quantize_activations(x))
    assert (result[2] == 0).all()
    assert (result[1] != 0).any()


def test_nan_stays_in_its_own_group() -> None:
    x = torch.randn(3, 256)
    clean_values, clean_scales = fp8.quantize_activations(x)
    x[1, 130] = torch.nan
    values, scales = fp8.quantize_activations(x)
    assert values[1, 130].to(torch.float32).isnan()
    same = torch.ones(3, 256, dtype=torch.bool)
    same[1, 128:] = False
    assert torch.equal(values.view(torch.uint8)[same], clean_values.view(torch.uint8)[same])
    assert scales.isfinite().all()
    assert torch.equal(scales[:, 0], clean_scales[:, 0])


@pytest.mark.parametrize("group", [None, 64, 128])
def test_activations_come_back_within_e4m3_rounding(group: int | None) -> None:
    x = torch.randn(5, 200)
    values, scales = fp8.quantize_activations(x, group)
    assert scales.shape[1] == (1 if group is None else -(-200 // group))
    back = fp8.dequantize_activations(values, scales, torch.float64, group=group or 128)
    assert ((back - x).abs() <= x.abs() * 2.0**-4 + 1e-6).all()


def test_a_scale_table_of_the_wrong_width_is_refused() -> None:
    values, scales = fp8.quantize_activations(torch.randn(2, 256), 64)
    with pytest.raises(ValueError, match="256 columns in groups of 128 need 2 scales, found 4"):
        fp8.dequantize_activations(values, scales)


def test_no_rows_quantise_to_no_rows() -> None:
    values, scales = fp8.quantize_activations(torch.zeros(0, 256))
    assert (values.shape, scales.shape) == ((0, 256), (0, 2))
