"""The checkpoint's tensors into this rank's parameters, and vLLM's shared MLP into ours; needs no vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from foldmoe.formats import Format, QuantizedTensor
from foldmoe.integrations.vllm.raw import RawExperts
from foldmoe.integrations.vllm.shared import SharedMLP
from foldmoe.integrations.vllm.stored import Storage
from foldmoe.moe import ExpertSpec, ExpertWeights
from tests.support.cases import make_experts, quantize

STORAGES = {
    "bf16": Storage(Format.BF16),
    "fp8": Storage(Format.FP8_128x128, "weight_scale_inv", torch.float32),
    "fp8-e8m0": Storage(Format.FP8_32x32, "weight_scale_inv", torch.float8_e8m0fnu),
    "mxfp4": Storage(Format.MXFP4, "weight_scale", torch.uint8),
}


def _stored(storage: Storage, width: int, hidden: int) -> dict[str, list[QuantizedTensor]]:
    """Three experts' w1, w3 and w2, as a checkpoint stores them."""
    generator = torch.Generator().manual_seed(7)

    def matrix(rows: int, columns: int) -> QuantizedTensor:
        e8m0 = storage.scale_dtype is not torch.float32 if storage.scale_dtype else None
        return quantize(torch.randn(rows, columns, generator=generator), storage.format, e8m0_scales=e8m0)

    shapes = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
    return {shard: [matrix(*shape) for _ in range(3)] for shard, shape in shapes.items()}


def _load(raw: RawExperts, module: nn.Module, shard: str, expert: int, tensor: QuantizedTensor) -> None:
    part = "w2" if shard == "w2" else "w13"
    names = [(f"{part}_weight", tensor.values)]
    if tensor.scales is not None:
        names.append((f"{part}_{raw.storage.scale_name}", tensor.scales))
    for name, values in names:
        raw.load(module._parameters[name], values, f"layer.experts.{name}", shard, expert)


def _raw(storage: Storage, width: int, hidden: int, rank: int = 0, parts: int = 1) -> tuple[RawExperts, nn.Module]:
    raw = RawExperts("layer", storage, 3, hidden, width // parts, rank, parts, torch.bfloat16)
    module = nn.Module()
    raw.register(module, None)
    return raw, module


def _stack(stored: dict[str, list[QuantizedTensor]]) -> ExpertWeights:
    def join(shard: str) -> QuantizedTensor:
        first = stored[shard][0]
        scales = None if first.scales is None else torch.stack([_bytes(t.scales) for t in stored[shard]])
        if scales is not None and first.scales is not None:
            scales = scales.view(first.scales.dtype)
        values = torch.stack([_bytes(t.values) for t in stored[shard]]).view(first.values.dtype)
        return QuantizedTensor(values, scales, format=first.format)

    return ExpertWeights.from_parts(join("w1"), join("w3"), join("w2"))


def _bytes(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@pytest.mark.parametrize("kind", list(STORAGES))
@pytest.mark.parametrize(("width", "parts"), [(384, 1), (192, 1), (384, 2), (576, 2), (320, 1), (1280, 4), (288, 1)])
def test_every_rank_loads_its_part_exactly(kind: str, width: int, parts: int) -> None:
    """Widths of 192, 288 and 320 a rank, with scale blocks that the cut divides."""
    storage = STORAGES[kind]
    stored = _stored(storage, width, 256)
    whole = _stack(stored)
    for rank in range(parts):
        raw, module = _raw(storage, width, 256, rank, parts)
        for shard, experts in stored.items():
            for expert, tensor in enumerate(experts):
                _load(raw, module, shard, expert, tensor)
        found, expected = raw.take(module), whole.shard(rank, parts)
        for part in ("gate_up", "down"):
            a, b = getattr(found, part).dequantize(torch.float64), getattr(expected, part).dequantize(torch.float64)
            assert torch.equal(a, b)
        assert found.nbytes <= expected.nbytes * 1.01
        assert not module._parameters
        spec = ExpertSpec(3, width, storage.format, e8m0_scales=storage.scale_dtype is not torch.float32).shard(parts)
        assert (found.gate_up.block[0], found.down.block[1]) == (storage.rows_block(width // parts), spec.block[1])


def test_scales_in_their_other_spelling_are_converted_exactly() -> None:
    """Float32 scales wanted, E8M0 stored (DeepSeek-V3.1), and bytes as uint8 or float8_e8m0fnu alike (case 26)."""
    stored = _stored(STORAGES["fp8-e8m0"], 256, 128)
    storage = Storage(Format.FP8_32x32, "weight_scale_inv", torch.float32)
    raw, module = _raw(storage, 256, 128)
    for shard, experts in stored.items():
        for expert, tensor in enumerate(experts):
            _load(raw, module, shard, expert, tensor)
    assert torch.equal(raw.take(module).down.dequantize(), _stack(stored).down.dequantize())
    mx = _stored(STORAGES["mxfp4"], 128, 128)
    found = []
    for dtype in (torch.uint8, torch.float8_e8m0fnu):
        raw, module = _raw(STORAGES["mxfp4"], 128, 128)
        for shard, experts in mx.items():
            for expert, tensor in enumerate(experts):
                scales = _bytes(tensor.scales).view(dtype)
                values = _bytes(tensor.values).view(torch.int8)
                _load(raw, module, shard, expert, QuantizedTensor(values, scales, format=Format.MXFP4))
        found.append(raw.take(module).gate_up.dequantize())
    assert torch.equal(*found)


def test_missing_damaged_and_misshapen_tensors_are_errors() -> None:
    """An expert that never came, a NaN, a transposed matrix: each with layer and tensor."""
    stored = _stored(STORAGES["fp8"], 256, 128)
    raw, module = _raw(STORAGES["fp8"], 256, 128)
    for shard, experts in stored.items():
        for expert, tensor in enumerate(experts):
            if (shard, expert) != ("w3", 2):
                _load(raw, module, shard, expert, tensor)
    with pytest.raises(ValueError, match=r"layer: 2 expert tensors are missing(.|\n)*expert 2: w13_weight \(w3\)"):
        raw.take(module)
    _load(raw, module, "w3", 2, stored["w3"][2])
    module._parameters["w2_weight"].data.view(torch.uint8)[1, 3, 1] = 0x7F
    with pytest.raises(ValueError, match=r"layer.w2_weight: 1 NaN or Inf, the first at \[1, 3, 1\]"):
        raw.take(module)
    raw, module = _raw(STORAGES["fp8"], 256, 128)
    with pytest.raises(ValueError, match=r"w2_weight \(w2\) has shape \[256, 128\].*expected \[128, 256\]"):
        raw.load(module._parameters["w2_weight"], stored["w1"][0].values, "layer.w2_weight", "w2", 0)
    with pytest.raises(ValueError, match=r"bfloat16 in the checkpoint, expected torch\.float8_e4m3fn"):
        raw.load(module._parameters["w2_weight"], torch.zeros(128, 256, dtype=torch.bfloat16), "w2_weight", "w2", 0)


def test_dummy_weights_miss_nothing_and_are_finite() -> None:
    """``--load-format dummy`` fills the parameters without a loader, and scales with bytes that mean NaN."""
    for storage in (STORAGES["mxfp4"], STORAGES["fp8-e8m0"], STORAGES["fp8"]):
        raw, module = _raw(storage, 128, 128)
        for name, parameter in module.named_parameters():
            parameter.data.view(torch.uint8).fill_(255 if "scale" in name else 0x38)
        found = raw.take(module)
        assert found.num_experts == 3
        assert found.down.dequantize().isfinite().all()
    weights = make_experts(Format.FP8_128x128, 1, 256, 128, e8m0_scales=True)
    module = _mlp(weights, SiluAndMul())
    module.down_proj.weight_scale_inv.data.view(torch.uint8).fill_(255)
    shared = SharedMLP.of(module)
    assert isinstance(shared, SharedMLP)
    taken = shared.take(dummy=True)
    assert taken.down.dequantize().isfinite().all()
    assert torch.equal(taken.gate_up.dequantize(), weights.gate_up.dequantize()), "scales that are numbers stay"


def test_dummy_codes_are_the_same_in_every_arm() -> None:
    """vLLM's dummy loader writes no integers, and its own layers start from zeros."""
    raw, module = _raw(STORAGES["mxfp4"], 128, 128)
    assert not raw.take(module).gate_up.dequantize().any()


class SiluAndMul(nn.Module):
    """Named as vLLM's own."""


class SiluAndMulWithClamp(nn.Module):
    """Named as vLLM's own."""

    swiglu_limit = 10.0


def _mlp(weights: ExpertWeights, act: nn.Module, **more: Any) -> nn.Module:
    """A module with the parameters that vLLM's shared MLPs have."""
    mlp = nn.Module()
    mlp.act_fn = act
    for name, tensor in (("gate_up_proj", weights.gate_up), ("down_proj", weights.down)):
        linear = nn.Module()
        linear.register_parameter("weight", nn.Parameter(tensor.values[0], requires_grad=False))
        if tensor.scales is not None:
            linear.register_parameter("weight_scale_inv", nn.Parameter(tensor.scales[0], requires_grad=False))
            linear.weight_block_size = list(tensor.format.block)  # type: ignore[assignment]
        setattr(mlp, name, linear)
    for name, value in more.items():
        setattr(mlp, name, value)
    return mlp


@pytest.mark.parametrize("format", [Format.BF16, Format.FP8_128x128, Format.FP8_32x32])
@pytest.mark.parametrize("e8m0", [False, True])
def test_the_shared_mlp_is_taken_as_it_is(format: Format, e8m0: bool) -> None:
    weights = make_experts(format, 1, 256, 128, e8m0_scales=e8m0 if format is not Format.BF16 else None)
    module = _mlp(weights, SiluAndMulWithClamp())
    found = SharedMLP.of(module)
    assert isinstance(found, SharedMLP)
    assert found.activation.limit == 10.0
    assert found.spec() == ExpertSpec.of(weights)
    address = module.gate_up_proj.weight.data_ptr()
    taken = found.take()
    assert torch.equal(taken.gate_up.dequantize(), weights.gate_up.dequantize())
    assert torch.equal(taken.down.dequantize(), weights.down.dequantize())
    assert taken.gate_up.values.data_ptr() == address, "the same storage: nothing is held twice"
    assert not list(module.gate_up_proj.parameters())


def test_other_shared_modules_stay_with_vllm() -> None:
    weights = make_experts(Format.BF16, 1, 64, 64)
    assert "no gate_up_proj" in str(SharedMLP.of(nn.Linear(4, 4, bias=False)))
    assert "GELU" in str(SharedMLP.of(_mlp(weights, nn.GELU())))
    assert isinstance(SharedMLP.of(_mlp(weights, SiluAndMul())), SharedMLP)
    biased = _mlp(weights, SiluAndMul())
    biased.down_proj.bias = nn.Parameter(torch.zeros(64))
    assert "biases" in str(SharedMLP.of(biased))
    quantised = _mlp(weights, SiluAndMul())
    quantised.down_proj._parameters["weight"] = nn.Parameter(torch.zeros(64, 64, dtype=torch.int8), requires_grad=False)
    assert "int8" in str(SharedMLP.of(quantised))
