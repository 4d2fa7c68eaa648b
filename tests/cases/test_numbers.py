"""Cases of section 2: scales, NaN, zero, padding. Each row's number is in the test's name."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe.formats import Format, QuantizedTensor, e8m0, refuse_nan
from foldmoe.formats.tensor import detect
from foldmoe.moe import Activation, ExpertSpec, ExpertWeights, LayerSpec
from foldmoe.planner import FusionPolicy, plan_layer
from foldmoe.reference import reference_moe
from tests.support.cases import (
    FLOAT32_TOLERANCE,
    FP8_TOLERANCE,
    TINY,
    assert_close,
    get_case,
    make_layer,
    quantize,
    random_case,
)
from tests.support.layers import FOLDS, HIDDEN, constant_experts, fold_layer, ones
from tests.support.strategies import FP8_FORMATS, QUANTIZED_FORMATS

if TYPE_CHECKING:
    from foldmoe.planner.policy import ActivationChoice, Fold

PRECISIONS = ("bf16", "fp8", "fp8_token")
E4M3 = torch.float8_e4m3fn


def test_case_24_byte_134_is_128() -> None:
    decoded = e8m0.decode(torch.tensor([126, 127, 128, 134, 255], dtype=torch.uint8)).tolist()
    assert decoded[:4] == [0.5, 1.0, 2.0, 128.0]
    assert math.isnan(decoded[4])


@pytest.mark.parametrize("format", [Format.MXFP4, *FP8_FORMATS])
@pytest.mark.parametrize("fold", FOLDS)
def test_case_26_scales_as_uint8_int8_and_e8m0_give_the_same_layer(format: Format, fold: Fold) -> None:
    routed, shared = make_layer(format, format, 3, 128, 128, 128, e8m0_scales=True)
    case = random_case(4, 2, 3, 128, dtype=torch.float32)

    def restored(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
        parts = (weights.gate_up, weights.down)
        return ExpertWeights(*(replace(t, scales=t.scales.view(torch.uint8).view(dtype)) for t in parts))

    results = [
        fold_layer(restored(routed, dtype), restored(shared, dtype), fold)(*case.args)
        for dtype in (torch.float8_e8m0fnu, torch.uint8, torch.int8)
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert_close(results[0], reference_moe(*case.args, routed, shared), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_case_26_wider_integers_are_no_scales(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="scales must be one of"):
        QuantizedTensor(torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 1, dtype=dtype), format=Format.MXFP4)


@pytest.mark.parametrize("format", FP8_FORMATS)
@pytest.mark.parametrize("byte", [0x7F, 0xFF])
def test_case_28_a_nan_byte_is_refused_by_name_and_index_and_never_448(format: Format, byte: int) -> None:
    tensor = quantize(torch.randn(64, 64), format)
    tensor.values.view(torch.uint8)[3, 1] = byte
    assert tensor.dequantize()[3, 1].isnan()
    with pytest.raises(ValueError, match=r"^shared_experts\.down_proj\.weight: 1 NaN or Inf, the first at \[3, 1\]"):
        refuse_nan(tensor, "shared_experts.down_proj.weight")


def test_case_28_a_nan_byte_inside_e4m3_scales_is_refused() -> None:
    tensor = quantize(torch.randn(64, 64), Format.NVFP4)
    tensor.scales.view(torch.uint8)[3, 1] = 0x7F
    with pytest.raises(ValueError, match=r"^down_proj\.weight_scale: 1 NaN or Inf, the first at \[3, 1\]"):
        refuse_nan(tensor, "down_proj.weight", "down_proj.weight_scale")


def spread_mxfp4(rows: int, columns: int, low: int) -> QuantizedTensor:
    """Every value one half; scales 1 but for the first group of 32 columns, whose byte is ``low``."""
    scales = torch.full((1, rows, columns // 32), 127, dtype=torch.uint8)
    scales[..., 0] = low
    return QuantizedTensor(torch.full((1, rows, columns // 2), 0x11, dtype=torch.uint8), scales, format=Format.MXFP4)


@pytest.mark.parametrize("low", [110, 60, 1, 0])
def test_case_30_groups_far_below_the_blocks_maximum_keep_their_numbers(low: int) -> None:
    dense = spread_mxfp4(4, 128, low).dequantize()
    assert (dense[..., :32] == 0.5 * 2.0 ** (low - 127)).all()
    assert (dense[..., 32:] == 0.5).all()


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("low", [113, 110, 90])
def test_case_30_the_layer_computes_with_them_exactly(fold: Fold, low: int) -> None:
    """Columns 0 .. 31 of x are large enough that flushing their weights to zero would show."""
    experts = ExpertWeights(spread_mxfp4(2 * 64, 64, low), spread_mxfp4(64, 64, low))
    x = torch.randn(3, 64)
    x[:, :32] *= 2.0 ** (127 - low)
    ids, weights = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    y = fold_layer(experts, experts, fold)(x, ids, weights)
    assert_close(y, reference_moe(x, ids, weights, experts, experts), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("format", [Format.MXFP4, *FP8_FORMATS])
def test_case_30_scale_byte_255_is_refused(format: Format) -> None:
    tensor = quantize(torch.randn(64, 64), format, e8m0_scales=True)
    tensor.scales.view(torch.uint8)[0, 0] = 255
    with pytest.raises(ValueError, match=r"^w\.scale: 1 NaN or Inf, the first at \[0, 0\]"):
        refuse_nan(tensor, "w", "w.scale")


def test_case_33_a_scale_table_of_the_wrong_width_is_refused() -> None:
    values = torch.zeros(16, 128, dtype=torch.uint8)
    assert QuantizedTensor(values, torch.zeros(16, 8, dtype=torch.uint8), format=Format.MXFP4).shape == (16, 256)
    with pytest.raises(ValueError, match=r"needs scales \[16, 8\], found \[16, 2\]"):
        QuantizedTensor(values, torch.zeros(16, 2, dtype=torch.uint8), format=Format.MXFP4)
    with pytest.raises(ValueError, match=r"fit no format of a \[16, 256\] matrix"):
        Format.detect(values, torch.zeros(16, 2, dtype=torch.uint8), (16, 256))


@pytest.mark.parametrize("format", QUANTIZED_FORMATS)
def test_case_33_so_is_one_that_is_too_wide_in_any_format(format: Format) -> None:
    stored = quantize(torch.randn(256, 256), format)
    wide = torch.cat((stored.scales, stored.scales), dim=-1)
    with pytest.raises(ValueError, match="needs scales"):
        replace(stored, scales=wide)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("activations", PRECISIONS)
@pytest.mark.parametrize("format", Format)
def test_case_34_a_zero_row_gives_exactly_zero(fold: Fold, activations: ActivationChoice, format: Format) -> None:
    routed, shared = make_layer(format, format, 4, 128, 128, 128)
    case = get_case("zero_rows", 6, 2, 4, 128)
    y = fold_layer(routed, shared, fold, activations=activations)(*case.args)
    assert (y[1::2] == 0).all()
    assert y.isfinite().all()
    assert (y[::2] != 0).any(dim=-1).all()


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("activations", PRECISIONS)
def test_case_34_a_tiny_row_stays_finite(fold: Fold, activations: ActivationChoice) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 4, 64, 64, 64)
    case = get_case("tiny_amax", 6, 2, 4, 64)
    y = fold_layer(routed, shared, fold, activations=activations)(*case.args)
    assert_close(y, reference_moe(*case.args, routed, shared, activations=activations), FP8_TOLERANCE)
    assert float(y[1::2].abs().max()) <= 100 * TINY


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("activations", PRECISIONS)
def test_case_36_rows_past_the_valid_count_never_matter(fold: Fold, activations: ActivationChoice) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 4, 64, 64, 64)
    layer = fold_layer(routed, shared, fold, activations=activations)
    clean = random_case(64, 2, 4, 64)
    x, ids, weights = (t.clone() for t in clean.args)
    x[8:], weights[8:] = torch.nan, torch.nan
    gate = torch.rand(64)
    dirty_gate = gate.clone()
    dirty_gate[8:] = torch.nan
    found = layer(x, ids, weights, shared_weights=dirty_gate, num_valid_tokens=8)
    expected = layer(*clean.args, shared_weights=gate, num_valid_tokens=8)
    assert torch.equal(found[:8], expected[:8])
    assert (found[8:] == 0).all()


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("junk", [-1, 0, 3, 12345, -12345])
def test_case_36_ids_past_the_valid_count_never_matter(fold: Fold, junk: int) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 4, 64, 64, 64)
    layer = fold_layer(routed, shared, fold)
    clean = random_case(8, 2, 4, 64)
    ids = clean.topk_ids.clone()
    ids[5:] = junk
    found = layer(clean.x, ids, clean.topk_weights, num_valid_tokens=5)
    assert torch.equal(found, layer(*clean.args, num_valid_tokens=5))


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("activations", PRECISIONS)
@pytest.mark.parametrize("say_so", [True, False])
def test_case_39_nan_in_padding_reaches_no_real_token(fold: Fold, activations: ActivationChoice, say_so: bool) -> None:
    """Whether or not the caller says where the padding starts."""
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 4, 64, 64, 64)
    layer = fold_layer(routed, shared, fold, activations=activations)
    clean = random_case(8, 2, 4, 64)
    x = clean.x.clone()
    x[3:] = torch.nan
    valid = 3 if say_so else None
    found = layer(x, *clean.args[1:], num_valid_tokens=valid)
    assert torch.equal(found[:3], layer(*clean.args, num_valid_tokens=valid)[:3])
    if say_so:
        assert torch.equal(found[:3], layer(*(t[:3] for t in clean.args)))


def layer_spec(name: str, shared: ExpertSpec) -> LayerSpec:
    return LayerSpec(name, 128, 2, ExpertSpec(8, 64, Format.MXFP4), shared, activations="fp8")


def test_case_41_each_layer_is_decided_by_itself() -> None:
    policy = FusionPolicy("slot", backend="torch")
    usual = plan_layer(layer_spec("layers.60", ExpertSpec(1, 64, Format.MXFP4)), policy, "cpu")
    odd = plan_layer(layer_spec("layers.61", ExpertSpec(1, 64, Format.FP8_128x128)), policy, "cpu")
    assert usual.strategy == "slot"
    assert odd.strategy == "serial"
    assert any("fp8_128x128 -> mxfp4" in reason for reason in odd.reasons)
    native = plan_layer(odd.spec, FusionPolicy(backend="torch"), "cpu")
    assert (native.strategy, native.extra_bytes) == ("native", 0)


def test_case_42_tensors_say_what_the_format_is() -> None:
    """int8 [N, K/2] is packed 4-bit whatever a global quantisation setting says; read as FP8 it is refused."""
    values, scales = torch.zeros(64, 64, dtype=torch.int8), torch.zeros(64, 4, dtype=torch.float8_e8m0fnu)
    assert Format.detect(values, scales, (64, 128)) is Format.MXFP4
    for format in FP8_FORMATS:
        with pytest.raises(TypeError, match=f"{format.value} values must be one of.*found int8"):
            QuantizedTensor(values, scales, format=format)


def test_case_42_a_header_alone_is_enough() -> None:
    assert detect(torch.int8, (64, 64), torch.float8_e8m0fnu, (64, 4), (64, 128)) is Format.MXFP4


def test_case_43_weight_scale_inv_is_a_multiplier() -> None:
    tensor = QuantizedTensor(torch.tensor([[2.0]]).to(E4M3), torch.tensor([[0.5]]), format=Format.FP8_128x128)
    assert tensor.dequantize().item() == 1.0


@pytest.mark.parametrize("scale", [0.5, 3.0, 2.0**-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_43_whatever_float_dtype_it_comes_in(scale: float, dtype: torch.dtype) -> None:
    tensor = QuantizedTensor(
        torch.full((4, 4), 2.0).to(E4M3), torch.tensor([[scale]], dtype=dtype), format=Format.FP8_128x128
    )
    assert (tensor.dequantize() == 2 * scale).all()


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("part", ["routed", "shared"])
@pytest.mark.parametrize(
    ("gate", "up", "limit", "act"),
    [
        (20.0, -20.0, 10.0, silu(10) * -10),
        (-20.0, 20.0, 10.0, silu(-20) * 10),
        (20.0, -20.0, None, silu(20) * -20),
        (20.0, -20.0, math.inf, silu(20) * -20),
    ],
)
def test_case_44_gate_is_clamped_above_and_up_on_both_sides_in_routed_and_shared(
    fold: Fold, part: str, gate: float, up: float, limit: float | None, act: float
) -> None:
    unit = silu(gate) * up  # constant_experts scales its output by the unclamped activation
    loud, silent = constant_experts(unit, gate=gate, up=up), constant_experts(0)
    routed, shared = (loud, silent) if part == "routed" else (silent, loud)
    layer = fold_layer(routed, shared, fold, activation=Activation(limit))
    y = layer(ones(1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    assert_close(y, torch.full((1, HIDDEN), act), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("fold", ["native", "off"])
def test_case_44_routed_and_shared_may_have_limits_of_their_own(fold: Fold) -> None:
    loud = constant_experts(silu(20) * 20, gate=20, up=20)
    layer = fold_layer(loud, loud, fold, activation=Activation(10), shared_activation=Activation(5))
    y = layer(ones(1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    assert_close(y, torch.full((1, HIDDEN), silu(10) * 10 + silu(5) * 5), FLOAT32_TOLERANCE)


def test_case_44_a_slot_is_refused_where_the_limits_differ() -> None:
    experts = ExpertSpec(8, 64, Format.MXFP4)
    spec = LayerSpec("layers.0", 64, 2, experts, replace(experts, count=1), Activation(10), Activation())
    plan = plan_layer(spec, FusionPolicy("slot", backend="torch"), "cpu")
    assert plan.strategy == "serial"
    assert any("activations differ" in reason for reason in plan.reasons)
