"""New weights for a loaded layer, by vLLM's own reload functions, and saving what is no parameter any more: errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foldmoe.formats import Format
from tests.support.cases import make_layer

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")

from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from foldmoe.integrations.vllm import plugin, reloading
from tests.vllm.factory import EXPERTS, HIDDEN, SHARED, WIDTH, SharedMLP, build

PAIR = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED, HIDDEN)


def _folded(name: str) -> tuple[torch.nn.ModuleDict, Any]:
    """A model of one folded layer, known to vLLM's reload as it was before loading, and the layer's entry."""
    shared = SharedMLP(PAIR[1])
    record_metadata_for_reloading(shared)
    model = torch.nn.ModuleDict({"shared_experts": shared, "experts": build(PAIR[0], shared, name)})
    return model, plugin.record().entries[-1]


def _give(linear: torch.nn.Module) -> None:
    """A new weight for a linear layer, as a model's ``load_weights`` hands it over."""
    linear.weight.weight_loader(linear.weight, torch.ones(linear.weight.shape, dtype=torch.bfloat16))


def test_new_weights_for_the_shared_expert_alone_are_an_error(engine: Any) -> None:
    model, entry = _folded("reload.shared")
    before = entry.moe.unpack()[1].down.dequantize()
    initialize_layerwise_reload(model)
    with pytest.raises(RuntimeError, match=r"reload.shared.experts: new weights came .* FOLDMOE_FOLD=stock"):
        _give(model["shared_experts"].down_proj)
    assert torch.equal(entry.moe.unpack()[1].down.dequantize(), before)


def test_a_reload_that_brings_this_layer_nothing_is_none_of_its_business(engine: Any) -> None:
    model, entry = _folded("reload.nothing")
    before = entry.moe.unpack()[1].down.dequantize()
    initialize_layerwise_reload(model)
    finalize_layerwise_reload(model, SimpleNamespace(dtype=torch.bfloat16))
    assert torch.equal(entry.moe.unpack()[1].down.dequantize(), before)
    assert not list(model.parameters())


@pytest.mark.parametrize("name", reloading.REFUSED)
def test_the_worker_refuses_before_anything_is_touched(engine: Any, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Of a worker whose layers are all vLLM's own nothing is kept."""
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Worker, name, lambda self, *words, **named: given.append((words, named)))
    reloading.guard()
    guarded = getattr(Worker, name)
    reloading.guard()
    assert getattr(Worker, name) is guarded
    worker = object.__new__(CPUWorker)
    kept = _folded(f"worker.{name}")
    with pytest.raises(RuntimeError, match=rf"{name} is refused .*: foldmoe packed \d+ layers, .* FOLDMOE_FOLD=stock"):
        getattr(worker, name)(path="somewhere")
    assert not given
    assert kept
    monkeypatch.setattr(plugin.record(), "entries", [])
    getattr(worker, name)("one", path="somewhere")
    assert given == [(("one",), {"path": "somewhere"})]
