"""A kernel's second start goes to what the first one compiled, with the arguments that Triton itself would pass."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="NOT CHECKED: needs triton (pip install foldmoe[gpu])")
from triton.compiler import CompiledKernel

from foldmoe.layer import FoldedMoE
from foldmoe.planner import FusionPolicy
from foldmoe.runtime import kernels
from foldmoe.runtime.kernels import Variant, start
from tests.support.cases import random_case
from tests.triton.support import weights


class Compiled(CompiledKernel):
    """Takes starts down."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments: self.calls.append((grid, arguments))


class Kernel:
    """Stands for a Triton kernel."""

    __name__ = "kernel"

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.first = compiled, 0
        self.pre_run_hooks: list[Any] = []
        self.signature = inspect.signature(lambda x, y, n=7, C=8: None)

    def __getitem__(self, grid: Any) -> Any:
        def first(*arguments: Any, **named: Any) -> Any:
            self.first += 1
            return self.compiled

        return first


def variant(kernel: Kernel) -> Variant:
    return Variant((kernel,), torch.device("cpu"), None)


def test_all_arguments_come_in_the_kernels_order_and_options_are_left_out() -> None:
    compiled = Compiled()
    kernel = Kernel(compiled)
    for _ in range(2):
        assert start(kernel, (3,), variant(kernel), 1, C=4, y=2, num_warps=4) is compiled
    start(kernel, lambda named: (named["y"], 6), variant(kernel), x=1, y=5, n=3, C=4, launch_pdl=True)
    assert kernel.first == 1
    assert compiled.calls == [((3, 1, 1), (1, 2, 7, 4)), ((5, 6, 1), (1, 5, 3, 4))]


def test_hooks_before_a_run_are_kept_and_an_interpreter_stays_one() -> None:
    hooked = Kernel(Compiled())
    start(hooked, (1,), variant(hooked), 1, 2)
    hooked.pre_run_hooks.append(print)
    start(hooked, (1,), variant(hooked), 1, 2)
    interpreted = Kernel(None)
    for _ in range(2):
        assert start(interpreted, (1,), variant(interpreted), 1, 2) is None
    assert hooked.first == interpreted.first == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="NOT CHECKED: needs a GPU")
@pytest.mark.parametrize("fold", ["native", "dual"])
@pytest.mark.parametrize("tokens", [3, 700])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_layers_second_call_starts_the_same(
    backend: str, tokens: int, fold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.nvidia.driver import CudaLauncher

    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("NOT CHECKED: needs a Hopper GPU")
    policy = FusionPolicy(fold, backend=backend)  # type: ignore[arg-type]
    layer = FoldedMoE(*weights("mxfp4-fp8", 8, 256, 256, 256, device="cuda"), policy=policy)
    case = random_case(tokens, 3, 8, 256).to("cuda")
    layer(case.x, case.topk_ids, case.topk_weights)
    launched: list[Any] = []
    before = CudaLauncher.__call__

    def told(self: Any, *arguments: Any) -> Any:
        launched.append([_plain(argument) for argument in arguments])
        return before(self, *arguments)

    monkeypatch.setattr(CudaLauncher, "__call__", told)
    outputs = []
    for remembered in (True, False):
        if not remembered:
            monkeypatch.setattr(kernels, "_started", dict.fromkeys(kernels._started))
        outputs.append(layer(case.x, case.topk_ids, case.topk_weights))
    count = len(launched) // 2
    y = outputs[1].data_ptr(), outputs[0].data_ptr()
    replaced = [[y[1] if value == y[0] else value for value in arguments] for arguments in launched[count:]]
    assert count >= 3
    assert launched[:count] == replaced
    assert torch.equal(*outputs)


def _plain(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if hasattr(argument, "base"):  # a descriptor
        return argument.base.data_ptr(), list(argument.shape), list(argument.strides), list(argument.block_shape)
    if type(argument).__name__ == "LazyDict":  # what Triton tells profilers
        return argument.data
    return argument
