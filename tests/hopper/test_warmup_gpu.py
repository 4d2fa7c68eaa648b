"""On a Hopper GPU: kernels compiled ahead, for a named device and by other processes, are the ones that calls find."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hopper.apart import NEEDS_HOPPER, run_apart

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = NEEDS_HOPPER

PROGRAM = """
import sys
import torch
from triton import knobs
import foldmoe
from foldmoe import FoldedMoE, FusionPolicy
from foldmoe.planner import plan_layer
from foldmoe.planner.devices import resolve
from foldmoe.warming import Calls, compile_ahead
from tests.runtime import support

backend, tokens = sys.argv[1], (1, 64, 1000)
plan = plan_layer(support.spec(), FusionPolicy(backend=backend), "h200")
report = compile_ahead([plan], Calls(tokens, ids=(torch.int32,)), resolve("h200"))
missed = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else missed.append(src.fn.__name__)
routed, shared = (part.to("cuda") for part in support.weights())
layer = FoldedMoE(
    routed,
    shared,
    activation=plan.spec.activation,
    shared_activation=plan.spec.shared_activation,
    policy=FusionPolicy(backend=backend),
    top_k=support.TOP_K,
)

def call(count):
    x = torch.randn(count, support.HIDDEN, device="cuda").to(torch.bfloat16)
    ids = torch.randint(0, support.EXPERTS, (count, support.TOP_K), device="cuda", dtype=torch.int32)
    return x, ids, torch.rand(count, support.TOP_K, device="cuda")

for count in tokens:
    layer(*call(count))
assert not missed, missed
assert foldmoe.warmup(layer, tokens, ids=[torch.int32]) == len(tokens)
given = call(64)
eager = layer(*given)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = layer(*given)
graph.replay()
torch.cuda.synchronize()
assert torch.equal(y, eager)
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(*call(5000))
except RuntimeError as error:
    assert "foldmoe.warmup(layer, tokens)" in str(error), error
else:
    raise AssertionError("a new batch size was compiled during a capture")
print(len(report.compiled), "compiled", layer.stats())
"""


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_nothing_compiles_after_compiling_ahead(backend: str, tmp_path: Path) -> None:
    said = run_apart(PROGRAM, backend, FOLDMOE_CACHE_DIR=str(tmp_path / "kernels"))
    assert int(said.split()[0]) > 0
