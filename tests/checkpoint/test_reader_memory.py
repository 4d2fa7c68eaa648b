"""How much memory reading takes above what it returns, measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe.checkpoint.generate import write
from foldmoe.checkpoint.generate.experts import Geometry, MoERecipe, Storage, moe_tensors
from foldmoe.formats import Format

if TYPE_CHECKING:
    from pathlib import Path

PEAK = """
import re, sys
from foldmoe.checkpoint import reader, read_headers, read_layers
from foldmoe.moe import ExpertWeights, Placement

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

copy, parts = reader._copy, ExpertWeights.from_parts.__func__
base = peak = filled = 0

def watch():
    global peak
    peak = max(peak, anonymous() - base - filled)

def watched_copy(into, at, one):
    global filled
    watch()
    copy(into, at, one)
    filled += one.nbytes
    watch()

def watched_parts(cls, *given):
    watch()
    made = parts(cls, *given)
    watch()
    return made

reader._copy, ExpertWeights.from_parts = watched_copy, classmethod(watched_parts)
for folder in sys.argv[1:]:
    headers = read_headers(folder)
    layer = read_layers(headers)[0]
    for tp in (1, 2):
        place = Placement(1, 0, tp, 0)
        with reader.TensorReader(headers) as r:  # first use of torch's kernels costs memory of its own
            list(reader.iter_experts(r, layer, range(1)))[0][1].shard(0, tp)
        base, peak, filled = anonymous(), 0, 0
        routed, shared, _ = reader.read_layer(headers, layer, place)
        assert routed.num_experts == 12
        print(peak / (layer.spec.routed.nbytes(layer.spec.hidden)))
        del routed, shared
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_above_the_packed_bytes_at_most_two_experts_are_alive(tmp_path: Path) -> None:
    folders = []
    for format in (Format.BF16, Format.FP8_128x128):
        recipe = MoERecipe(Geometry(1024, 512, 12, 2), Storage(format), Storage(format))
        named = moe_tensors("model.layers.0.mlp", recipe, torch.Generator().manual_seed(0))
        folders.append(str(write(tmp_path / format.value, {"num_experts_per_tok": 2}, named)))
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *folders],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # freed memory goes back at once and is not counted
    )
    peaks = [float(line) for line in done.stdout.split()]
    assert len(peaks) == 4
    assert all(0.3 < peak <= 2.0 for peak in peaks), peaks  # near zero would mean that nothing was measured
