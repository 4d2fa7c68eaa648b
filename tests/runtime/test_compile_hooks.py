"""Engines watch for compiled kernels through Triton's hooks, which take no argument that is not JSON."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from foldmoe.bench.serve import observe
from foldmoe.runtime.kernels import Variant, start

knobs = pytest.importorskip("triton", reason="needs Triton").knobs


class Kernel:
    """Stands for a Triton kernel that is compiled when it is started."""

    __name__ = "tiles"

    def __init__(self) -> None:
        self.hooks: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        self.hooks.append((knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook))
        return lambda *arguments, **named: "compiled"


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    def hook(**facts: Any) -> None:
        raise TypeError("Object of type HopperConfig is not JSON serializable")

    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hook)
    return hook


def test_hooks_are_off_while_a_kernel_is_compiled_and_back_afterwards(
    watched: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kernel, variant = Kernel(), Variant(("hooks", 1), torch.device("cpu"), None)
    with caplog.at_level(logging.WARNING, logger="foldmoe"):
        assert start(kernel, (1,), variant) == "compiled"
    assert kernel.hooks == [(None, None)]
    assert knobs.runtime.jit_post_compile_hook is watched
    assert observe.compiled(caplog.text) == ("tiles",)  # a benchmark still sees it


def test_nothing_is_said_where_nobody_watches(caplog: pytest.LogCaptureFixture) -> None:
    start(Kernel(), (1,), Variant(("hooks", 2), torch.device("cpu"), None))
    assert not caplog.records
