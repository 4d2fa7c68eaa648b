"""Scratch memory: what was cut out of a buffer is kept with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from foldmoe.runtime import workspace
from foldmoe.runtime.workspace import Carve
from tests.runtime import support

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


class Gpu:
    """What the workspace asks of CUDA, on a machine without it; its memory is a CPU's."""

    device = torch.device("cuda", 0)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream, self.capturing = 1, False
        empty = torch.empty
        monkeypatch.setattr(torch, "empty", lambda *shape, device, **options: empty(*shape, **options))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=self.stream))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        self.current = support.Current(monkeypatch)
        monkeypatch.setattr(workspace, "_held", {})

    def take(self, stream: int, rows: int = 4) -> torch.Tensor:
        """A layer's buffer in a call on ``stream``."""
        self.stream = stream
        return carve(rows).take(self.device)["x"]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def spans(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    return sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)


def test_case_67_two_streams_never_share_a_buffer(gpu: Gpu) -> None:
    """Two layers on two streams, by turns, one of which needs more from the third turn on."""
    for turn in range(100):
        one, other = gpu.take(1), gpu.take(2, rows=4 if turn < 3 else 4000)
        (_, end), (start, _) = spans(one, other)
        assert end <= start, f"turn {turn}"
        one.fill_(1)
        other.fill_(2)
        assert (one == 1).all()
        assert (other == 2).all()
    assert len(workspace._held) == 2


def test_layers_of_one_stream_share_its_buffer(gpu: Gpu) -> None:
    first, second = gpu.take(1), gpu.take(1, rows=3)
    assert first.data_ptr() == second.data_ptr()
    assert gpu.take(1, rows=4000).nbytes == 4000 * 16
    assert gpu.take(1).data_ptr() == gpu.take(1, rows=4000).data_ptr()  # it has grown and stays
    assert len(workspace._held) == 1
    assert workspace.held_bytes(gpu.device) == carve(4000).nbytes


def test_one_stream_handle_on_two_devices_is_two_streams(gpu: Gpu) -> None:
    first = carve(4).take(gpu.device)["x"]
    other = carve(4).take(torch.device("cuda", 1))["x"]
    assert first.data_ptr() != other.data_ptr()
    workspace.release(gpu.device)
    assert [device.index for device, *_ in workspace._held] == [1]


def test_a_graph_takes_memory_of_its_own(gpu: Gpu) -> None:
    eager = gpu.take(1)
    gpu.capturing = True
    captured, again = gpu.take(1), gpu.take(1)
    assert len({t.data_ptr() for t in (eager, captured, again)}) == 3
    gpu.capturing = False
    assert gpu.take(1).data_ptr() == eager.data_ptr()


def test_the_stream_that_is_captured_is_looked_for_on_the_tensors_gpu(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.current.index == 1)
    gpu.take(1)
    assert len(workspace._held) == 1
    carve(4).take(torch.device("cuda", 1))  # of a graph there: it is not kept
    assert len(workspace._held) == 1
    assert gpu.current.index == 0


def test_on_rocm_a_small_call_never_gets_a_long_buffer(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's AMD backend has kernels of their own for long ones; a CUDA GPU holds one buffer for both."""
    monkeypatch.setattr(workspace, "SHORT", 1 << 16)
    for hip, buffers in ((None, 1), ("7.0", 2)):
        monkeypatch.setattr(torch.version, "hip", hip)
        workspace.release()
        sizes = [gpu.take(1, rows).untyped_storage().nbytes() > workspace.SHORT for rows in (4, 40_000, 4, 40_000)]
        assert sizes == ([False, True, False, True] if hip else [False, True, True, True])
        assert len(workspace._held) == buffers
        assert workspace.held_bytes(gpu.device) >= carve(40_000).nbytes
