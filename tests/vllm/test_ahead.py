"""Kernels compiled while a server starts: for which batches, by how many processes, and once a layer."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foldmoe.formats import Format
from foldmoe.planner.devices import KNOWN
from foldmoe.warming import Calls, Report, sizes
from tests.support.cases import make_layer

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")

from foldmoe.integrations.vllm import ahead, plugin
from tests.vllm.factory import EXPERTS, HIDDEN, SHARED, WIDTH, SharedMLP, build


def config(batched: int, ranks: int, replica: int | None = None) -> Any:
    """What is read of vLLM's own."""
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=batched),
        parallel_config=SimpleNamespace(
            data_parallel_size=ranks, data_parallel_rank_local=replica, enable_elastic_ep=False
        ),
        model_config=SimpleNamespace(dtype=torch.bfloat16),
    )


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Plans, calls, device and processes of every start."""
    found: list[tuple[Any, ...]] = []

    def note(plans: Any, calls: Any, device: Any, *, processes: int, done: Any) -> None:
        found.append((list(plans), calls, device, processes))

    monkeypatch.setattr(ahead, "compile_beside", note)
    monkeypatch.setattr(ahead, "resolve", lambda device: KNOWN["h200"])
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 64)
    return found


@pytest.mark.parametrize(("batched", "ranks", "most"), [(2048, 1, 2048), (2048, 4, 8192), (16384, 8, 16384)])
def test_batches_are_those_of_all_gathered_ranks(
    begun: list[tuple[Any, ...]], batched: int, ranks: int, most: int
) -> None:
    ahead.begin([], config(batched, ranks), 0)
    assert begun == [([], Calls(sizes(most)), KNOWN["h200"], 8)]


def test_one_rank_a_host_compiles(begun: list[tuple[Any, ...]]) -> None:
    for local_rank, replica in ((1, None), (0, 3), (0, 0)):
        ahead.begin([], config(64, 4, replica), local_rank)
    assert len(begun) == 1


def test_layers_are_compiled_for_once_and_not_on_a_cpu(
    engine: Any, begun: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED, HIDDEN)
    build(pair[0], SharedMLP(pair[1], None), "layer.ahead.cpu")
    assert not begun
    plans = plugin.record().plans
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(plugin.record(), "begun", 0)
    for _ in range(2):  # the main model, then a draft without a layer of ours
        plugin.note_loaded(config(512, 1))
    assert [found[0] for found in begun] == [plans, []]
    monkeypatch.setattr(plugin.record(), "compile_ahead", False)
    plugin.note_loaded(config(512, 1))
    assert len(begun) == 2


@pytest.mark.parametrize(
    ("report", "level", "line"),
    [
        (Report("h200", ["up"], ["down"], 12.3), "INFO", "2 kernels ready for every batch size after 12 s, 1 of them"),
        (RuntimeError("no compiler"), "WARNING", "compiled when first needed, because .* failed: no compiler"),
        (Report("cpu"), "", ""),
    ],
)
def test_the_log_tells_the_end(
    report: Report | Exception, level: str, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ahead, "logger", lambda: logging.getLogger("told"))
    with caplog.at_level(logging.INFO, logger="told"):
        ahead._tell(report)
    assert [record.levelname for record in caplog.records] == ([level] if level else [])
    assert not level or re.search(line, caplog.text)
