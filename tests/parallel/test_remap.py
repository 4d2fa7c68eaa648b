"""Routes to slots: one kernel and one torch expression, the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.moe.slots import SlotMap, append_shared_slot, check_replicas, local_ids, owners
from foldmoe.parallel import remap, simulate
from foldmoe.parallel.remap import launch
from foldmoe.runtime import kernels
from tests.parallel.support import deal, make_case, virtual, weights_of

pytest.importorskip("triton")

from foldmoe.backends.triton.launch import launch_in_order
from foldmoe.parallel.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Callable


def test_the_kernel_equals_the_torch_expression() -> None:
    """In the interpreter, which needs a process of its own."""
    folder = Path(__file__).parent / "interpreted"
    command = [sys.executable, "-m", "pytest", str(folder), "-q", "-p", "no:cacheprovider", "--no-cov"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=folder.parents[2], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.parametrize("target", [("cuda", 90, 32), ("hip", "gfx942", 64)])
@pytest.mark.parametrize("integers", ["*i32", "*i64"])
@pytest.mark.parametrize("gated", [False, True])
def test_the_kernel_compiles_for_gpus(target: tuple[str, int | str, int], integers: str, gated: bool) -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from foldmoe.parallel.remap_kernel import BLOCK, remap_kernel

    constants = {"GATED": gated, "RANKS": 8, "BLOCK": BLOCK}
    signature = dict.fromkeys(("total", "top_k", "ranks", "experts", "shared_slot"), "i32")
    signature |= {"ids": integers, "out_ids": integers, "ends": "*i64", "strays": "*i64"}
    signature |= dict.fromkeys(("weights", "shared_weights", "out_weights"), "*fp32")
    signature |= dict.fromkeys(constants, "constexpr")
    names = [parameter.name for parameter in remap_kernel.params]
    source = ASTSource(
        fn=remap_kernel,
        signature={name: signature[name] for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    triton.compile(source, target=GPUTarget(*target))


@pytest.mark.gpu
@pytest.mark.parametrize("top_k", [1, 3, 6, 8, 17, 32])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_kernel_on_a_gpu(top_k: int, dtype: torch.dtype) -> None:
    slots, tokens = SlotMap.even(385, 8), 1000
    ids, weights = torch.randint(-1, 385, (tokens, top_k), dtype=dtype), torch.rand(tokens, top_k)
    found = remap(ids.cuda(), weights.cuda(), slots, 5, top_k=top_k)
    for mine, truth in zip(found, remap(ids, weights, slots, 5, top_k=top_k), strict=True):
        assert torch.equal(mine.cpu(), truth)


def test_on_a_cpu_it_is_the_torch_expression() -> None:
    ids, weights = torch.tensor([[0, 3], [-1, 2]]), torch.rand(2, 2)
    found = remap(ids, weights, SlotMap((2, 2)), 1, top_k=2)
    expected = append_shared_slot(ids, weights, experts_per_rank=2, rank=1, top_k=2)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("mapping", [remap, launch])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_list_that_was_remapped_is_refused(mapping: Callable[..., Any], dtype: torch.dtype) -> None:
    """Its slots would pass for experts, wherever they are few enough: top_k alone tells."""
    slots = SlotMap((4, 4))
    ids, weights = torch.tensor([[0, 1], [-1, 2]], dtype=dtype), torch.rand(2, 2)
    once = remap(ids, weights, slots, 0, top_k=2)
    assert int(once[0].max()) < slots.num_experts
    message = "the route list is 3 wide but the router chooses 2: a shared slot is appended here and never comes from"
    with pytest.raises(ValueError, match=message):
        mapping(*once, slots, 0, top_k=2)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'top_k'"):
        mapping(*once, slots, 0)


def test_a_compile_during_a_graph_capture_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of an exchange go the way of all others, so that a first call inside a capture says what to do."""
    monkeypatch.setattr(kernels, "capturing", lambda device: True)
    monkeypatch.setattr(kernels, "_started", {})
    advice = "would be compiled during a CUDA graph capture; warm up first: call foldmoe.warmup"
    with pytest.raises(RuntimeError, match=f"'remap_kernel' {advice}"):
        launch(torch.zeros(2, 2).long(), torch.zeros(2, 2), SlotMap((2, 2)), 0, top_k=2)
    moe = virtual(weights_of(4), simulate(1), dtype=torch.float32)
    part = moe.route(0, deal(make_case(3, 4), [3])[0], 1.0)
    with pytest.raises(RuntimeError, match=f"'pack_kernel' {advice}"):
        Rows(moe.scheme, moe._strays).pack(part, 3)
    assert not kernels._started


class Recorder:
    """Stands in for a kernel."""

    params, arg_names = (), ["x", "rows", "y", "columns", "BLOCK"]
    __name__ = "recorder"

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.grid = grid
        return self

    def __call__(self, **arguments: Any) -> None:
        self.arguments = arguments


def test_arguments_in_order_reach_the_kernel_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_started", {})
    kernel, x, y = Recorder(), torch.zeros(2), torch.ones(3)
    launch_in_order(kernel, (7,), x, 16, y, 1, BLOCK=32, num_warps=8)
    assert kernel.grid == (7,)
    assert kernel.arguments.pop("x") is x
    assert kernel.arguments.pop("y") is y
    assert kernel.arguments == {"rows": 16, "columns": 1, "BLOCK": 32, "num_warps": 8}
    assert len(kernels._started) == 1
    launch_in_order(kernel, (7,), x, 32, y, 1, BLOCK=32, num_warps=8)
    assert len(kernels._started) == 1, "another multiple of 16 is the same variant"
    launch_in_order(kernel, (7,), x, 17, y, 1, BLOCK=32, num_warps=8)
    assert len(kernels._started) == 2


def test_the_launcher_refuses_what_does_not_fit() -> None:
    slots = SlotMap((2, 2))
    with pytest.raises(TypeError, match=r"int32 or int64, found torch\.float32"):
        launch(torch.zeros(2, 2), torch.zeros(2, 2), slots, 0, top_k=2)
    with pytest.raises(ValueError, match=r"do not fit"):
        launch(torch.zeros(2, 2).long(), torch.zeros(2, 1), slots, 0, top_k=2)
    with pytest.raises(ValueError, match="2 wide but the router chooses 1"):
        launch(torch.zeros(2, 2).long(), torch.zeros(2, 2), slots, 0, top_k=1)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_owners_and_local_ids(dtype: torch.dtype) -> None:
    ids = torch.tensor([[-1, 0, 2], [3, 4, 5], [6, 7, -5]], dtype=dtype)
    counts = (3, 0, 2, 2)
    assert owners(ids, counts).tolist() == [[4, 0, 0], [2, 2, 3], [3, 4, 4]]
    assert local_ids(ids, counts, 2).tolist() == [[-1, -1, -1], [0, 1, -1], [-1, -1, -1]]
    assert local_ids(ids, counts, 1).eq(-1).all()
    assert local_ids(ids, counts, 0).dtype == dtype


@pytest.mark.parametrize(
    ("physical", "message"),
    [
        ([[0], [-1]], r"without one: \[1\]"),
        ([[0, 1], [1, -1]], r"physical experts \[1\] stand for more than one"),
        ([[-1, 0], [1, -1]], "replicas come first in its row"),
    ],
)
def test_impossible_replicas_are_refused(physical: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_replicas(torch.tensor(physical))
