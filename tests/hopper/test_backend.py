"""The protocol's side that needs no GPU: reasons, bytes, pack and unpack of whole layers."""

import subprocess
import sys

import pytest
import torch

from foldmoe.backends import Unsupported, get
from foldmoe.backends.base import Call
from foldmoe.backends.hopper.backend import HopperBackend
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


@pytest.mark.parametrize("shared_format", [Format.FP8_128x128, Format.FP8_32x32, None])
@pytest.mark.parametrize("consume", [False, True])
def test_unpack_gives_the_stored_tensors_back(shared_format, consume):
    routed = weights(3, 256, 192, mxfp4.quantize)
    shared = weights(1, 256, 128, lambda w: fp8.quantize_block(w, shared_format)) if shared_format else None
    stored = [t.clone() for w in (routed, shared) if w for q in (w.gate_up, w.down) for t in q.tensors().values()]
    layer = HopperBackend().pack(
        routed, shared, activation=Activation(7.0), shared_activation=Activation(), activations="fp8", consume=consume
    )
    back = [w for w in layer.unpack() if w]
    found = [t for w in back for q in (w.gate_up, w.down) for t in q.tensors().values()]
    assert len(found) == len(stored)
    for a, b in zip(found, stored, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    spec = LayerSpec("l", 256, 2, ExpertSpec.of(routed), ExpertSpec.of(shared) if shared else None, activations="fp8")
    assert HopperBackend().packed_nbytes(spec) == layer.nbytes
    assert HopperBackend().supports(spec, "fp8") == ()


def test_reasons_name_what_is_wrong():
    routed = ExpertSpec(8, 40, Format.MXFP8)
    shared = ExpertSpec(1, 64, Format.MXFP8)
    found = HopperBackend().supports(LayerSpec("l", 192, 2, routed, shared), "bf16")
    text = "; ".join(found)
    for part in ("activations bf16", "mxfp8", "192", "40", "1x32"):
        assert part in text, text


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
    other = LayerSpec("l", 256, 2, ExpertSpec(8, 192, Format.BF16), None)
    plan = plan_layer(other, device="h200")
    assert plan.backend == "triton"
    assert any(reason.startswith("hopper: routed experts in bf16") for reason in plan.reasons)
    assert HopperBackend().unavailable(resolve("cpu")) == "needs a Hopper GPU (sm_90), found cpu"


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
    assert done.stdout.strip() == "triton is not installed: pip install foldmoe[gpu]", done.stdout + done.stderr


@pytest.mark.parametrize("shared", [True, False])
def test_launches_hold_only_what_there_is_to_do(shared):
    common = weights(1, 256, 128, lambda w: fp8.quantize_block(w, Format.FP8_128x128)) if shared else None
    layer = pack(weights(2, 256, 128, mxfp4.quantize), common)
    routed, both = ((1,), (1, 2)) if shared else ((1,), (1,))

    def launches(top_k=2, rows=None, with_routed=True):
        call = Call(
            torch.zeros(3, 256), torch.zeros(3, top_k, dtype=torch.int64), torch.ones(3, top_k), shared_rows=rows
        )
        return layer._launches(call, routed=with_routed)

    assert launches() == both
    assert launches(rows=(2, 2)) == routed
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
