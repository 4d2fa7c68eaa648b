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
    """Stands for a Triton kernel that is compiled, or found in Triton's cache, when it is started."""

    __name__ = "tiles"

    def __init__(self, cache_hit: bool = False) -> None:
        self.hooks: list[Any] = []
        self.cache_hit = cache_hit

    def __getitem__(self, grid: Any) -> Any:
        self.hooks.append((knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook))
        knobs.compilation.listener(src=self, metadata={}, metadata_group={}, times=None, cache_hit=self.cache_hit)
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


def test_a_kernel_from_the_cache_is_no_news_and_other_listeners_hear_of_it(
    watched: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **facts: heard.append((facts["src"], facts["cache_hit"])))
    listener, kernel = knobs.compilation.listener, Kernel(cache_hit=True)
    with caplog.at_level(logging.WARNING, logger="foldmoe"):
        start(kernel, (1,), Variant(("hooks", 3), torch.device("cpu"), None))
    assert not caplog.records
    assert heard == [(kernel, True)]
    assert knobs.compilation.listener is listener


def test_nothing_is_said_where_nobody_watches(caplog: pytest.LogCaptureFixture) -> None:
    start(Kernel(), (1,), Variant(("hooks", 2), torch.device("cpu"), None))
    assert not caplog.records
