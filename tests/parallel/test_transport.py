"""Where a process group's numbers lie."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist

from foldmoe.parallel import DistributedTransport

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def _default_group(tmp_path: Path) -> Iterator[None]:
    """Of this process alone, no backend named."""
    dist.init_process_group(init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_default_group")
@pytest.mark.parametrize(
    ("backends", "gpus", "expected"),
    [
        ("cpu:gloo,cuda:nccl", True, "cuda:3"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("cuda:nccl", True, "cuda:3"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),
        ("cpu:gloo", True, "cpu"),
    ],
)
def test_a_group_is_on_the_devices_that_its_backends_are_for(
    backends: str, gpus: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert str(DistributedTransport().device) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="the default group is on the GPU here")
@pytest.mark.usefixtures("_default_group")
def test_a_default_group_without_gpus_exchanges_on_the_cpu() -> None:
    transport = DistributedTransport()
    assert transport.device == torch.device("cpu")
    assert transport.all_gather([torch.arange(3)])[0].tolist() == [[0, 1, 2]]
