"""On a Hopper GPU: a launch whose counters never arrive gives up, and says which tile waited for what.

In a process of its own: a trap ends every later CUDA call of its process.
"""

from __future__ import annotations

import re

import pytest

from tests.hopper.apart import NEEDS_HOPPER, run_apart

pytestmark = NEEDS_HOPPER

PROGRAM = """
import sys
import torch
from foldmoe.backends.hopper import launch, workspace
from tests.hopper.gpu_layers import Shape, case_of, gpu_layer, run

counters, width = sys.argv[1], int(sys.argv[2])
shape = Shape("mxfp4-fp8_e8m0", 1024, width, 128)
layer, case = gpu_layer(shape), case_of(shape, 3, "random")
run(layer, case)
torch.cuda.synchronize()
assert (layer.packed._last.parts > 1) == (counters == "parts"), layer.packed._last
tiles = launch.Step.tiles

def without_arrivals(step, section):
    first = workspace.MET if counters == "parts" else workspace.HEAD + 5 * step.buffers.capacity
    end = workspace.HEAD if counters == "parts" else None
    step.buffers.control[first:end] -= 1000
    return tiles(step, section)

launch.Step.tiles = without_arrivals
run(layer, case)
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("CUDA:", str(error).splitlines()[0])
try:
    layer.stats()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(("counters", "width"), [("hidden vectors", 2048), ("parts", 128)], ids=str)
def test_a_launch_whose_counters_never_arrive_names_its_tile(counters: str, width: int) -> None:
    said = run_apart(PROGRAM, counters, str(width))
    assert "CUDA:" in said
    told = re.search(r"gave up after two seconds: ticket (\d+) waited for (\d+) parts .*, (-\d+) came", said)
    assert told, said
    _ticket, wanted, came = map(int, told.groups())
    assert 0 <= came + 1000 <= wanted
