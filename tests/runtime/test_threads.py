"""Threads of one process: first starts that overlap, and a thread that serves while another one compiles ahead."""

from __future__ import annotations

from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.runtime import kernels
from foldmoe.runtime.kernels import Compiler, Variant, compiling, start
from foldmoe.runtime.offline import standing_in

if TYPE_CHECKING:
    from collections.abc import Callable

triton = pytest.importorskip("triton", reason="NOT CHECKED: needs Triton (pip install foldmoe[gpu])")
CPU = torch.device("cpu")


class Kernel:
    """Stands for a Triton kernel; ``first`` is what its first start does."""

    __name__ = "tiles"

    def __init__(self, first: Callable[[], object]) -> None:
        self.first = first
        self.pre_run_hooks: list[Any] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.first()


@pytest.fixture(autouse=True)
def _none_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_started", {})


def test_first_starts_that_overlap_leave_an_engines_hooks_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = triton.knobs
    hooks = [lambda **facts: None for _ in range(2)]
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", hooks[0])
    monkeypatch.setattr(knobs.compilation, "listener", hooks[1])
    one_is_in, other_is_in = Event(), Event()
    seen: list[object] = []

    def first() -> None:
        seen.append(knobs.runtime.jit_post_compile_hook)
        one_is_in.set()
        other_is_in.wait(0.5)

    def second() -> None:
        seen.append(knobs.runtime.jit_post_compile_hook)
        other_is_in.set()
        threads[0].join(5)  # that one leaves first, where nothing keeps this one out

    def begin(run: Callable[[], None]) -> None:
        kernel = Kernel(run)
        if run is second:
            one_is_in.wait(5)
        start(kernel, (1,), Variant((kernel,), CPU, None))

    threads = [Thread(target=begin, args=(run,)) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [None, None]
    assert knobs.runtime.jit_post_compile_hook is hooks[0]
    assert knobs.compilation.listener is hooks[1]


def elsewhere(run: Callable[[], object]) -> object:
    """What ``run`` gives in a thread of its own."""
    found: list[object] = []
    thread = Thread(target=lambda: found.append(run()))
    thread.start()
    thread.join(10)
    (one,) = found
    return one


def test_a_thread_that_serves_starts_kernels_while_another_compiles() -> None:
    ran: list[str] = []
    asked: list[str] = []
    kernel = Kernel(lambda: ran.append("ran"))

    def serve() -> object:
        return start(kernel, (1,), Variant((kernel,), CPU, None))

    with compiling(Compiler(lambda name: bool(asked.append(name)), lambda compiled: None)):  # type: ignore[func-returns-value]
        for _ in range(2):
            elsewhere(serve)
        assert (ran, asked) == (["ran", "ran"], [])
        serve()
    assert (ran, asked) == (["ran", "ran"], ["tiles"])


class Driver:
    """Stands for a GPU's driver."""

    utils = "loads binaries"

    def get_current_target(self) -> str:
        return "the real GPU"

    def get_current_device(self) -> int:
        return 3

    def get_current_stream(self, device: int) -> int:
        return 77 + device


def test_a_stand_in_stands_in_for_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver

    def told() -> tuple[object, ...]:
        active = driver.active
        device = active.get_current_device()
        return device, active.get_current_stream(device), str(active.get_current_target()), hasattr(active, "utils")

    monkeypatch.setattr(driver, "_active", Driver())
    real = (3, 80, "the real GPU", True)
    with standing_in("cuda", "sm_90"):
        assert elsewhere(told) == real
        device, stream, target, utils = told()
        assert (device, stream, utils) == ("stand-in for sm_90", 0, False)
        assert "arch=90" in str(target)
    assert told() == real
