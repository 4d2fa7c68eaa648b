"""Scratch memory: what was cut out of a buffer is kept with it."""

from __future__ import annotations

import pytest
import torch

from foldmoe.runtime import workspace
from foldmoe.runtime.workspace import Carve

CPU = torch.device("cpu")


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> workspace._Held:
    """One buffer, as between calls on one stream of a GPU."""
    one = workspace._Held(torch.empty(1 << 16, dtype=torch.uint8))
    monkeypatch.setattr(workspace, "_hold", lambda device, nbytes: one)
    return one


def carve(rows: int) -> Carve:
    found = Carve()
    found.add("x", (rows, 8), torch.bfloat16)
    found.add("none", (0, 8), torch.float32)
    return found


def test_the_same_cut_of_the_same_memory_is_made_once(held: workspace._Held) -> None:
    one, other = carve(4), carve(4)
    made = [one.kept(CPU, dict), one.kept(CPU, dict), other.kept(CPU, dict)]
    assert made[0] is made[1]
    assert made[2] is not made[0]
    assert made[0]["x"].data_ptr() == held.memory.data_ptr()
    assert made[0]["none"].numel() == 1
    held.made.clear()  # as when a larger buffer takes this one's place
    assert one.kept(CPU, dict) is not made[0]


def test_no_more_is_kept_than_is_said(held: workspace._Held) -> None:
    cuts = [carve(rows) for rows in range(1, workspace.MOST_KEPT + 2)]
    for cut in cuts:
        cut.kept(CPU, dict)
    assert len(held.made) == 1


def test_on_a_cpu_memory_is_new_each_time() -> None:
    one = carve(4)
    first, second = one.kept(CPU, dict), one.kept(CPU, dict)
    assert first["x"].data_ptr() != second["x"].data_ptr()
