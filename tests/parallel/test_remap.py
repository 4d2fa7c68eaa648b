"""Routes to slots: one kernel and one torch expression, the same numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from foldmoe.moe.slots import SlotMap, append_shared_slot, check_replicas, local_ids, owners
from foldmoe.parallel import remap
from foldmoe.parallel.remap import launch

pytest.importorskip("triton")


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
    found = remap(ids.cuda(), weights.cuda(), slots, 5)
    for mine, truth in zip(found, remap(ids, weights, slots, 5), strict=True):
        assert torch.equal(mine.cpu(), truth)


def test_on_a_cpu_it_is_the_torch_expression() -> None:
    ids, weights = torch.tensor([[0, 3], [-1, 2]]), torch.rand(2, 2)
    found = remap(ids, weights, SlotMap((2, 2)), 1)
    expected = append_shared_slot(ids, weights, experts_per_rank=2, rank=1)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_launcher_refuses_what_does_not_fit() -> None:
    slots = SlotMap((2, 2))
    with pytest.raises(TypeError, match=r"int32 or int64, found torch\.float32"):
        launch(torch.zeros(2, 2), torch.zeros(2, 2), slots, 0)
    with pytest.raises(ValueError, match=r"do not fit"):
        launch(torch.zeros(2, 2).long(), torch.zeros(2, 1), slots, 0)
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
