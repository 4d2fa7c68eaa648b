"""Compiles that would fall into a graph capture are refused; configs and scratch memory are what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from foldmoe.backends.triton import launch as launching
from foldmoe.backends.triton.config import Machine, choose
from foldmoe.runtime import kernels
from foldmoe.runtime.workspace import ALIGNMENT, Carve
from tests.triton.support import pack, weights


class Recorder:
    """Stands in for a kernel."""

    params = ()
    __name__ = "up"

    def __init__(self) -> None:
        self.runs = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self

    def __call__(self, **arguments: Any) -> None:
        self.runs += 1


def test_a_compile_during_capture_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Recorder(), {"x": torch.zeros(16)}
    launching.launch(kernel, (1,), x, {"tokens": 4}, BM=16)
    monkeypatch.setattr(kernels, "capturing", lambda device: True)
    launching.launch(kernel, (1,), x, {"tokens": 4}, BM=16)
    with pytest.raises(RuntimeError, match="'up' would be compiled during a CUDA graph capture; warm up first"):
        launching.launch(kernel, (1,), x, {"tokens": 4}, BM=32)
    with pytest.raises(RuntimeError, match="warm up first"):
        launching.launch(kernel, (1,), {"x": torch.zeros(16, dtype=torch.int32)}, {"tokens": 4}, BM=16)
    assert kernel.runs == 2


@pytest.mark.parametrize("machine", [Machine(232448), Machine(65536, most_stages=2), Machine(101376)])
@pytest.mark.parametrize("tokens", [1, 16, 128, 512, 2048, 8192])
def test_config(tokens: int, machine: Machine) -> None:
    layer = pack(*weights("mxfp4-fp8", 8, 64, 64, 64), "fp8")
    config = choose(layer.routed, layer.shared, tokens, 2, machine)
    assert config == choose(layer.routed, layer.shared, tokens, 2, machine)
    assert config.up.rows == 128
    assert config.up.routed_tokens == config.down.routed_tokens
    assert config.up.routed_tokens >= min(16, tokens // 4)
    assert "routed_tokens=" in str(config)


def test_buffers_are_disjoint_and_aligned() -> None:
    carve = Carve()
    carve.add("a", (3,), torch.int32)
    carve.add("none", (0, 4), torch.float32)
    carve.add("b", (2, 5), torch.bfloat16)
    found = carve.take(torch.device("cpu"))
    assert found["a"].shape == (3,)
    assert found["b"].shape == (2, 5)
    assert carve.nbytes == 3 * ALIGNMENT
    addresses = [t.data_ptr() for t in found.values()]
    assert [address - addresses[0] for address in addresses] == [0, ALIGNMENT, 2 * ALIGNMENT]
