"""The humming peer without a GPU: its weights, its C++ and the order of its launches, over torch stand-ins."""

from __future__ import annotations

import json
import re
import sys
from math import exp
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from foldmoe import Format
from foldmoe.bench.peers import PEERS, base, combine, humming, humming_weights, vllm_ops
from foldmoe.moe import Activation

from . import support

FORMATS = (Format.MXFP4, Format.FP8_128x128, Format.FP8_32x32)


@pytest.mark.parametrize("format", FORMATS)
def test_converted_weights_stand_for_the_stored_numbers(format: Format) -> None:
    _, (routed, _) = support.layer(routed=format)
    for stored in (routed.gate_up, routed.down):
        kept = {name: tensor.clone() for name, tensor in stored.tensors().items()}
        given = humming_weights.tensors(stored)
        numbers = support.decode(given["weight"], given["weight_scale"], stored.shape[-1])
        assert torch.equal(numbers, stored.dequantize())
        for tensor in given.values():
            tensor.view(torch.uint8).zero_()  # humming transforms in place
        assert all(torch.equal(kept[n].view(torch.uint8), t.view(torch.uint8)) for n, t in stored.tensors().items())


def test_formats_that_humming_does_not_take_are_refused() -> None:
    _, (routed, _) = support.layer(routed=Format.BF16)
    with pytest.raises(ValueError, match="humming takes no bf16"):
        humming_weights.tensors(routed.down)


@pytest.mark.parametrize("limit", [None, 0.5, 10.0])
def test_the_activation_in_cxx_is_ours(limit: float | None) -> None:
    activation = Activation(limit)
    text = re.sub(r"(\d)f\b", r"\1", humming.cxx(activation).replace("1.f", "1."))
    for a, b in ((-3.0, 0.2), (0.3, -0.7), (20.0, -20.0), (11.0, 12.0)):
        found = eval(text, {"a": a, "b": b, "fminf": min, "fmaxf": max, "expf": exp})
        wanted = activation(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
        assert found == pytest.approx(float(wanted), rel=1e-12)


@pytest.mark.parametrize("name", ["humming", "humming-token", "humming-w4a16"])
def test_refusals_say_what_is_missing(name: str) -> None:
    spec, _ = support.layer(routed=Format.BF16, shared=Format.BF16)
    reasons = "; ".join(PEERS[name].refusals(spec, torch.device("cpu")))
    assert "needs a Hopper GPU, asked for cpu" in reasons
    assert "routed experts are bf16; this peer is for mxfp4" in reasons
    assert "the shared expert is not block FP8" in reasons


def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base.metadata, "version", lambda name: {"humming-kernels": "0.2.0"}[name])
    assert "written for humming-kernels==0.1.19, found 0.2.0" in str(base.installed("humming-kernels==0.1.19"))


BLOCK = 3
"""Rows of a tile, so that experts are padded and no tile is a whole expert."""


def _forward(config: Any, *, inputs: Tensor, outputs: Tensor, tuning_config: str, **given: Any) -> Tensor:
    """``humming_forward`` in torch: dense, or one tile of one expert at a time."""
    assert json.loads(tuning_config)["block_shape"][0] == BLOCK
    weight = support.decode(given["weight"], given["weight_scale"], config.shape_k)
    outputs.fill_(float("nan"))
    if given["sorted_ids"] is None:
        outputs.copy_(inputs.to(torch.float32) @ weight.T)
        return outputs
    assert given["valid_shape_m"] == len(outputs)
    for tile, routes in enumerate(given["sorted_ids"][: int(given["num_tokens_padded"])].split(BLOCK)):
        routes = routes[routes < len(outputs)].long()
        x = inputs[routes // given["top_k"]].to(torch.float32)
        outputs[routes] = (x @ weight[given["expert_ids"][tile]].T).to(outputs.dtype)
    return outputs


def _round(config: Any, *, inputs: Tensor, activation_type: str = "none", activation_impl: str = "") -> Any:
    if activation_type == "binary_split":
        assert activation_impl == humming.cxx(Activation(1.0))
        gate, up = inputs.to(torch.float32).chunk(2, dim=-1)
        inputs = Activation(1.0)(gate, up).to(inputs.dtype)
    return inputs, None, None


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, dict[str, Any]] = {
        "humming": {},
        "humming.transform": {"transform_humming_tensors": lambda config, tensors: tensors},
        "humming.forward": {"humming_forward": _forward, "may_process_input": _round},
    }
    for name, members in modules.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        humming,
        "layer_config",
        lambda shape, *_: SimpleNamespace(
            shape_n=shape[-2], shape_k=shape[-1], pad_shape_n=0, num_experts=shape[0] if len(shape) == 3 else 0
        ),
    )
    monkeypatch.setattr(humming, "tuning", lambda *_: {"block_shape": [BLOCK, 128, 128]})
    monkeypatch.setattr(vllm_ops, "align", support.align)
    monkeypatch.setattr(
        combine,
        "weighted_sum",
        lambda routed, weights, shared: (
            (routed.view(*weights.shape, -1).to(torch.float32) * weights[..., None]).sum(1) + shared
        ).to(shared.dtype),
    )


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("shared", [Format.FP8_128x128, Format.FP8_32x32])
def test_the_launches_make_up_the_layer(shared: Format) -> None:
    pytest.importorskip("triton")
    spec, weights = support.layer(shared=shared)
    peer = humming.HummingBf16()
    run = base.step(humming.HummingLayer(spec, *weights, peer.inputs), "serial", torch.device("cpu"))
    for tokens in (1, 5, 17):
        batch = support.batch(spec, tokens)
        assert base.check(peer, run(batch), batch, spec, *weights) < 0.01
