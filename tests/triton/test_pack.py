"""What the backend says before and at packing: reasons, availability, views of the stored bytes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from foldmoe.backends import Unsupported
from foldmoe.backends.triton.backend import TritonBackend
from foldmoe.backends.triton.layout import matrix
from foldmoe.backends.triton.limits import refusals
from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import ExpertSpec, LayerSpec
from foldmoe.planner.devices import KNOWN, Device
from tests.triton.support import PAIRS, pack, weights

SPEC = LayerSpec("layers.0.ffn", 4096, 6, ExpertSpec(256, 2048, Format.MXFP4), ExpertSpec(1, 2048, Format.FP8_128x128))


def changed(**routed: Any) -> LayerSpec:
    return replace(SPEC, routed=replace(SPEC.routed, **routed))


@pytest.mark.parametrize("activations", ["bf16", "fp8", "fp8_token"])
@pytest.mark.parametrize("width", [32, 64, 96, 192, 288, 320, 576, 2304])
def test_widths_by_32_are_taken(width: int, activations: Any) -> None:
    assert refusals(changed(width=width), activations) == ()
    shared = ExpertSpec(1, width, Format.FP8_128x128, (64, 64))
    assert refusals(replace(SPEC, shared=shared), activations) == ()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (changed(width=40), "routed width 40 is no multiple of 32"),
        (replace(SPEC, shared=ExpertSpec(1, 40, Format.FP8_128x128)), "shared width 40 is no multiple of 32"),
        (replace(SPEC, hidden=4100), "hidden size 4100 is no multiple of 32"),
        (changed(format=Format.NVFP4, block=(1, 16)), "routed experts are nvfp4"),
        (changed(format=Format.FP8_128x128, block=(16, 16)), "routed scales cover 16 columns"),
        (changed(format=Format.FP8_128x128, block=(64, 96)), "routed scales cover 96 columns, which no K step"),
        (changed(format=Format.BF16, block=(1, 1), float_bytes=4), "32-bit floats"),
        (changed(count=4096), "4096 routed experts"),
        (changed(width=2**19), "the limit is 2**31"),
    ],
)
def test_refusals_name_the_reason(spec: LayerSpec, words: str) -> None:
    assert any(words in reason for reason in TritonBackend().supports(spec, "fp8"))


def test_devices() -> None:
    backend = TritonBackend()
    assert all(backend.unavailable(KNOWN[name]) is None for name in ("a100", "h200", "b200", "mi300x"))
    assert backend.unavailable(KNOWN["cpu"]) == "needs a CUDA or ROCm device"
    assert "sm_75" in (backend.unavailable(Device("t4", "cuda", "sm_75")) or "")


def test_without_triton_the_backend_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'triton' else find(name, *a)\n"
        "from foldmoe.backends.triton.backend import TritonBackend\n"
        "from foldmoe.planner.devices import KNOWN\n"
        "print(TritonBackend().unavailable(KNOWN['h200']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'foldmoe[gpu]'" in done.stdout


@pytest.mark.parametrize("pair", PAIRS)
def test_packing_copies_nothing_and_unpacks_bit_for_bit(pair: str) -> None:
    pytest.importorskip("triton")
    stored = weights(pair, 2, 96, 64, 64)
    layer = pack(*stored, "fp8")
    for before, after, experts in zip(stored, layer.unpack(), (layer.routed, layer.shared), strict=True):
        for old, new in ((before.gate_up, after.gate_up), (before.down, after.down)):
            assert all(a is b for a, b in zip(old.tensors().values(), new.tensors().values(), strict=True))
        for tensor, view in ((before.gate_up, experts.gate_up), (before.down, experts.down)):
            assert view.words.data_ptr() == tensor.values.data_ptr()
            assert tensor.scales is None or view.scales.data_ptr() == tensor.scales.data_ptr()
    assert layer.nbytes == stored[0].nbytes + stored[1].nbytes


def test_plain_floats_other_than_bf16_are_refused_at_packing() -> None:
    pytest.importorskip("triton")
    routed, _ = weights("bf16-bf16", 2, 64, 64, 64)
    wide = replace(routed.down, values=routed.down.values.to(torch.float32))
    with pytest.raises(Unsupported, match=r"routed down: plain weights must be bfloat16, found torch\.float32"):
        pack(replace(routed, down=wide), None, "bf16")


def fp8_matrix(block: tuple[int, int], rows: int = 64, columns: int = 192) -> QuantizedTensor:
    values = torch.zeros(2, rows, columns).to(torch.float8_e4m3fn)
    scales = torch.ones(2, -(-rows // block[0]), -(-columns // block[1]))
    return QuantizedTensor(values, scales, format=Format.FP8_128x128, block=block)


def test_scales_that_change_within_a_step_are_refused_at_packing() -> None:
    """Along the hidden size, where no header tells."""
    with pytest.raises(Unsupported, match="routed gate_up: scales cover 96 columns, which do not fit steps of 64"):
        matrix(fp8_matrix((64, 96)), "routed gate_up")
    for columns in (32, 64, 128, 192):
        matrix(fp8_matrix((64, columns)), "routed gate_up")


@pytest.mark.parametrize("where", ["stride", "offset"])
def test_codes_at_odd_bytes_are_refused_at_packing(where: str) -> None:
    stride, offset = (17, 0) if where == "stride" else (18, 1)
    codes = torch.zeros(1 + 32 * 18, dtype=torch.uint8).as_strided((1, 32, 16), (32 * stride, stride, 1), offset)
    odd = QuantizedTensor(codes, torch.full((1, 32, 1), 127, dtype=torch.uint8), format=Format.MXFP4)
    with pytest.raises(Unsupported, match=rf"routed down: codes .* begin at odd ones: strides .*{stride}, 1\), offset"):
        matrix(odd, "routed down")


def test_rows_too_far_apart_for_32_bits_are_refused_at_packing() -> None:
    stride = 2**20

    def plain(rows: int) -> QuantizedTensor:
        whole = torch.empty(2, rows, stride, dtype=torch.bfloat16, device="meta")
        return QuantizedTensor(whole[:, :, :64], format=Format.BF16)

    with pytest.raises(Unsupported, match=r"routed gate_up: one expert spans 2147483712 elements .* limit is 2\*\*31"):
        matrix(plain(2049), "routed gate_up")
    assert matrix(plain(2048), "routed gate_up").columns == 64
    fp8 = fp8_matrix((64, 64))
    wide = replace(fp8, scales=torch.empty(2, 1, 2**30 + 1, device="meta").as_strided((2, 1, 3), (1, 1, 2**30)))
    with pytest.raises(Unsupported, match=r"routed down scales: one expert spans 2147483649 elements"):
        matrix(wide, "routed down")


@pytest.mark.parametrize("pair", ["mxfp4-fp8", "fp8-fp8", "fp8_e8m0-fp8_e8m0"])
def test_a_scale_of_nan_is_refused_at_packing(pair: str) -> None:
    pytest.importorskip("triton")
    routed, shared = weights(pair, 2, 64, 64, 64)
    scales = routed.down.scales
    assert scales is not None
    if scales.is_floating_point() and scales.element_size() > 1:
        scales[1, 0, 0] = torch.nan
    else:
        scales.view(torch.uint8)[1, 0, 0] = 255
    with pytest.raises(ValueError, match=r"routed down: 1 scales are NaN or Inf, the first at \[1, 0, 0\]"):
        pack(routed, shared, "fp8")
