"""The protocol's side that needs no GPU: reasons, bytes, pack and unpack of whole layers."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from foldmoe.backends import Unsupported, get
from foldmoe.backends.base import Call
from foldmoe.backends.hopper import workspace
from foldmoe.backends.hopper.backend import HopperBackend
from foldmoe.bench.shapes import SHAPES
from foldmoe.formats import Format, QuantizedTensor, fp8, mxfp4
from foldmoe.moe import Activation, ExpertSpec, ExpertWeights, LayerSpec
from foldmoe.planner import FusionPolicy, plan_layer
from foldmoe.planner.devices import resolve

pytest.importorskip("triton", reason="NOT CHECKED: the Hopper backend needs triton (pip install foldmoe[gpu])")


def weights(count, hidden, width, quantize):
    g = torch.Generator().manual_seed(3)
    up = torch.randn(count, 2 * width, hidden, generator=g) * 0.02
    down = torch.randn(count, hidden, width, generator=g) * 0.02
    return ExpertWeights(quantize(up), quantize(down))


def quantizer(stored, e8m0_scales=None):
    if stored is Format.MXFP4:
        return mxfp4.quantize
    if stored is Format.BF16:
        return lambda w: QuantizedTensor(w.to(torch.bfloat16), format=stored)
    return lambda w: fp8.quantize_block(w, stored, e8m0_scales=e8m0_scales)


@pytest.mark.parametrize("shared_format", [Format.FP8_128x128, Format.FP8_32x32, None])
@pytest.mark.parametrize(
    ("routed_format", "e8m0_scales", "width"),
    [
        (Format.MXFP4, None, 192),
        (Format.FP8_128x128, False, 128),
        (Format.FP8_128x128, True, 384),
        (Format.FP8_32x32, True, 192),
        (Format.FP8_32x32, False, 320),
        (Format.BF16, None, 192),
    ],
)
@pytest.mark.parametrize("consume", [False, True])
def test_unpack_gives_the_stored_tensors_back(routed_format, e8m0_scales, width, shared_format, consume):
    activations = "bf16" if routed_format is Format.BF16 else "fp8"
    if activations == "bf16" and shared_format:
        shared_format = Format.BF16
    routed = weights(3, 256, width, quantizer(routed_format, e8m0_scales))
    shared = weights(1, 256, 128, quantizer(shared_format)) if shared_format else None
    stored = [t.clone() for w in (routed, shared) if w for q in (w.gate_up, w.down) for t in q.tensors().values()]
    layer = HopperBackend().pack(
        routed,
        shared,
        activation=Activation(7.0),
        shared_activation=Activation(),
        activations=activations,
        consume=consume,
    )
    back = [w for w in layer.unpack() if w]
    found = [t for w in back for q in (w.gate_up, w.down) for t in q.tensors().values()]
    assert len(found) == len(stored)
    for a, b in zip(found, stored, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    spec = LayerSpec(
        "l", 256, 2, ExpertSpec.of(routed), ExpertSpec.of(shared) if shared else None, activations=activations
    )
    assert HopperBackend().packed_nbytes(spec) == layer.nbytes
    assert HopperBackend().supports(spec, activations) == ()
    spec = replace(spec, activation=Activation(7.0))
    outlined = HopperBackend().outline(spec, activations, resolve("h200")).weights
    assert outlined.geometry == layer.weights.geometry
    assert outlined.powers == layer.weights.powers == (shared is None or shared.down.e8m0_scales)
    for role in ("up", "down", "shared_up", "shared_down"):
        part, planned = getattr(layer.weights, role), getattr(outlined, role)
        if part is not None:
            assert planned.factors.shape == part.factors.shape
            assert planned.shape == part.shape
            if routed_format is not Format.MXFP4:
                assert planned.values.shape == part.values.shape


def test_reasons_name_what_is_wrong():
    routed = ExpertSpec(8, 40, Format.NVFP4)
    shared = ExpertSpec(1, 64, Format.MXFP8)
    found = HopperBackend().supports(LayerSpec("l", 192, 2, routed, shared), "bf16")
    text = "; ".join(found)
    for part in ("activations bf16", "nvfp4", "192", "40", "1x32"):
        assert part in text, text


def test_scale_blocks_of_routed_fp8_are_checked():
    found = HopperBackend().supports(LayerSpec("l", 256, 2, ExpertSpec(8, 64, Format.MXFP8)), "fp8")
    assert found == ("routed scale blocks of 1x32; rows must be a multiple of 8, columns of 32",)
    regridded = ExpertSpec(8, 192, Format.FP8_128x128, block=(64, 64))
    assert HopperBackend().supports(LayerSpec("l", 256, 2, regridded), "fp8") == ()


def test_a_scale_out_of_range_is_refused_before_anything_is_written_over():
    routed = weights(2, 256, 128, quantizer(Format.FP8_128x128, False))
    routed.down.scales[1, 1, 0] = 2.0**-120
    kept = [t.clone() for q in (routed.gate_up, routed.down) for t in q.tensors().values()]
    with pytest.raises(Unsupported, match="routed down: a scale lies outside"):
        pack(routed, None, consume=True)
    left = [t for q in (routed.gate_up, routed.down) for t in q.tensors().values()]
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(left, kept, strict=True))


def test_a_nan_scale_ends_packing():
    """No other backend is tried: it would run the layer."""
    routed = weights(2, 256, 128, quantizer(Format.FP8_128x128, False))
    routed.down.scales[1, 1, 0] = torch.nan
    with pytest.raises(ValueError, match="routed down: 1 scales are NaN") as raised:
        pack(routed, None)
    assert not isinstance(raised.value, Unsupported)


def test_transposed_bf16_weights_are_unsupported():
    def part(rows, columns):
        return QuantizedTensor(torch.randn(2, columns, rows, dtype=torch.bfloat16).mT, format=Format.BF16)

    with pytest.raises(Unsupported, match=r"routed gate_up: a row's values lie 256 apart; give .* \.contiguous\(\)"):
        pack(ExpertWeights(part(256, 128), part(128, 128)), None, activations="bf16")


def test_more_routes_a_token_than_a_block_counts_are_refused():
    spec = LayerSpec("l", 256, 129, ExpertSpec(256, 64, Format.MXFP4))
    assert HopperBackend().supports(spec, "fp8") == ("129 routes a token; at most 128",)


def test_span_is_refused_with_the_count_before_anything_is_written_over():
    routed = weights(2, 256, 128, mxfp4.quantize)
    scales = routed.down.scales.view(torch.uint8)
    scales[1, :5, 0] = 90
    values = routed.down.values.view(torch.uint8)
    values[1, :5, :16] |= 1
    bad = ExpertWeights(routed.gate_up, QuantizedTensor(values, scales, format=Format.MXFP4))
    kept = [t.clone() for q in (bad.gate_up, bad.down) for t in q.tensors().values()]
    with pytest.raises(Unsupported, match="routed down, expert 1: the exponents of 5 of 256 rows"):
        pack(bad, None, consume=True)
    left = [t for q in (bad.gate_up, bad.down) for t in q.tensors().values()]
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(left, kept, strict=True))


def pack(routed, shared, **options):
    given = {"activation": Activation(7.0), "shared_activation": Activation(), "activations": "fp8"} | options
    return HopperBackend().pack(routed, shared, **given)


def test_chosen_on_a_hopper():
    assert isinstance(get("hopper"), HopperBackend)
    spec = LayerSpec("l", 256, 2, ExpertSpec(8, 192, Format.MXFP4), None, activations="fp8")
    assert plan_layer(spec, device="h200").backend == "hopper"
    assert plan_layer(spec, FusionPolicy(backend="triton"), device="h200").backend == "triton"
    plan = plan_layer(spec, device="b200")
    assert plan.backend == "triton"
    assert "hopper: needs a Hopper GPU (sm_90), found sm_100" in plan.reasons
    v3 = LayerSpec("l", 7168, 8, ExpertSpec(256, 2048, Format.FP8_128x128), ExpertSpec(1, 2048, Format.FP8_128x128))
    v3 = replace(v3, activations="fp8")
    assert plan_layer(v3, device="h200").backend == "hopper"
    plan = plan_layer(replace(v3, shared=ExpertSpec(1, 2048, Format.BF16)), device="h200")
    assert plan.backend == "triton"
    assert "hopper: shared expert in bf16; the launch folds block FP8" in plan.reasons
    other = LayerSpec("l", 256, 2, ExpertSpec(8, 192, Format.NVFP4), None)
    plan = plan_layer(other, device="h200")
    assert plan.backend != "hopper"
    assert any(reason.startswith("hopper: routed experts in nvfp4") for reason in plan.reasons)
    glm = LayerSpec("l", 4096, 8, ExpertSpec(128, 1408, Format.BF16), ExpertSpec(1, 1408, Format.BF16))
    assert plan_layer(glm, device="h200").backend == "hopper"
    for wrong, reason in (
        (replace(glm, shared=ExpertSpec(1, 1408, Format.FP8_128x128)), "shared expert in fp8_128x128 beside bf16"),
        (replace(glm, routed=ExpertSpec(128, 1408, Format.BF16, float_bytes=4)), "routed experts in floats of 4 bytes"),
        (replace(glm, activations="fp8"), "activations fp8: the launch multiplies bf16 weights by bf16"),
    ):
        assert any(reason in found for found in HopperBackend().supports(wrong, wrong.activations)), reason
    assert HopperBackend().unavailable(resolve("cpu")) == "needs a Hopper GPU (sm_90), found cpu"


@pytest.mark.parametrize(
    ("shape", "dual"),
    [("A", {17, 32, 64}), ("B", set()), ("C", set()), ("GLM", {1}), ("GLM-bf16", {1})]
    + [(shape, set()) for shape in ("GLM-4.5", "V3", "Qwen3-Next")],
)
def test_two_streams_where_they_measured_faster(shape, dual):
    """V4-Flash's 256 experts on one card and a rank of eight; FP8 and bf16 experts whose down tiles nearly fit."""
    spec = SHAPES[shape].spec
    plan = plan_layer(spec, FusionPolicy(), resolve("h200"))
    assert {tokens for tokens in (1, 16, 17, 32, 64, 65, 8192) if not plan.folds_at(tokens)} == dual
    assert all(plan_layer(spec, FusionPolicy("native"), resolve("h200")).folds_at(tokens) for tokens in (1, 32, 128))


def test_imports_and_answers_without_triton():
    code = """
import sys
sys.modules["triton"] = None
import importlib.util as u
find = u.find_spec
u.find_spec = lambda name, *a: None if name.startswith("triton") else find(name, *a)
from foldmoe.backends import get
from foldmoe.planner.devices import resolve
print(get("hopper").unavailable(resolve("h200")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "triton is not installed: pip install 'foldmoe[gpu]'", done.stdout + done.stderr


@pytest.mark.parametrize("shared", [True, False])
def test_launches_hold_only_what_there_is_to_do(shared):
    common = weights(1, 256, 128, lambda w: fp8.quantize_block(w, Format.FP8_128x128)) if shared else None
    layer = pack(weights(2, 256, 128, mxfp4.quantize), common)
    routed, both = ((1,), (1, 2)) if shared else ((1,), (1,))

    def launches(top_k=2, rows=None, with_routed=True, most=None):
        x, ids = torch.zeros(3, 256), torch.zeros(3, top_k, dtype=torch.int64)
        call = Call(x, ids, torch.ones(3, top_k), shared_rows=rows, most_rows=most)
        return layer._launches(call, routed=with_routed)

    assert launches() == both
    assert launches(rows=(2, 2)) == routed
    assert launches(rows=(2, 2), most=3) == both  # on the other ranks there are some
    assert launches(rows=torch.tensor([2, 2])) == both
    assert launches(top_k=0) == both[1:]
    assert launches(with_routed=False) == both[1:]


def test_nothing_to_run_gives_zeros():
    layer = pack(weights(2, 256, 128, mxfp4.quantize), None)
    none = Call(torch.ones(3, 256), torch.zeros(3, 0, dtype=torch.int64), torch.ones(3, 0))
    assert torch.equal(layer.forward(none, folded=True), torch.zeros(3, 256))
    empty = Call(torch.ones(0, 256), torch.zeros(0, 2, dtype=torch.int64), torch.ones(0, 2))
    assert layer.forward(empty, folded=True).shape == (0, 256)
    assert layer.forward_shared(empty).dtype == torch.float32
    assert layer.stats() == {"ids_out_of_range": 0, "config": None, "tuned": 0, "heuristic": 0}


def test_a_launch_that_gave_up_is_named_by_its_tile(monkeypatch):
    layer = pack(weights(2, 256, 128, mxfp4.quantize), None)
    reports = {layer.weights.device: torch.tensor([1, 77, 3, 8], dtype=torch.int32)}
    monkeypatch.setattr(workspace, "stall_report", reports.__getitem__)
    with pytest.raises(
        RuntimeError, match="ticket 77 waited for 8 parts of its hidden vectors or of its sum over K, 3 came"
    ):
        layer.stats()
    reports[layer.weights.device].zero_()
    assert layer.stats()["ids_out_of_range"] == 0
