"""``foldmoe bench parallel`` over two gloo processes, and what its table says."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from foldmoe.bench.parallel import fit, timing, virtual
from foldmoe.bench.parallel.launch import run
from foldmoe.bench.parallel.result import ParallelRequest, ParallelResult, ParallelRow
from foldmoe.bench.shapes import SHAPES
from foldmoe.cli.main import app
from foldmoe.report.parallel_table import HEADINGS, cells, parallel_table

if TYPE_CHECKING:
    from pathlib import Path

ROW = ParallelRow(
    128, "symmetric", "native", "folded", 20e-6, 500e-6, 30e-6, 540e-6, 530e-6, 560e-6,
    graph=True, sent=1_600_000, bound=510e-6, predicted=300e-6, same_bits=True,
)  # fmt: skip


@pytest.mark.timeout(200)
def test_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = "bench parallel --shape cpu --tokens 1 --arms folded --schemes native --rounds 1 --inputs 1 --ranks 2"
    found = CliRunner().invoke(app, [*command.split(), "--out", str(out)])
    assert found.exit_code == 0, found.output
    result = ParallelResult.load(out)
    assert [row.transport for row in result.rows] == ["allgather", "alltoall"]
    assert result.refused == {"symmetric": "rank 0: the group has no GPUs (gloo)"}
    assert all(row.same_bits for row in result.rows)
    for row in result.rows:
        assert min(row.dispatch, row.local, row.combine, row.total) > 0
        assert row.bound is not None
        assert not row.graph
    gather, scatter = result.rows
    assert gather.sent == (2048 + 48) + 2048  # one row and one result, bf16, to the only other rank
    assert scatter.sent <= gather.sent
    assert result.link > 0
    assert result.command.startswith("foldmoe bench parallel --shape cpu --tokens 1 --arms folded --schemes native")


def test_what_rows_say() -> None:
    assert ROW.overlap == pytest.approx(1 - 40 / 50)
    assert ROW.bandwidth == pytest.approx(1.6e6 / 50e-6)
    shown = dict(zip(HEADINGS, cells(ROW), strict=True))
    assert shown["x bound"] == "1.06"
    assert shown["estimate"] == "300 !"  # 44 % off
    assert shown["bits"] == "same"
    assert cells(replace(ROW, predicted=450e-6))[-2] == "450"
    assert cells(replace(ROW, same_bits=False))[-1] == "differ"
    assert cells(replace(ROW, graph=False))[1] == "symmetric*"


def test_a_saved_result_is_the_same_again(tmp_path: Path) -> None:
    request = ParallelRequest("A", (1, 8), transports=("symmetric",), ranks=2)
    assert request.command == "foldmoe bench parallel --shape A --tokens 1,8 --transports symmetric --ranks 2"
    result = ParallelResult(
        request, "what", "spec", 2, "hopper", 4e11, "copies", {"torch": "2.11"}, [ROW], {"slot": "no"}
    )
    result.save(tmp_path / "file.json")
    assert ParallelResult.load(tmp_path / "file.json") == result
    console = Console(width=190, file=io.StringIO(), record=True)
    console.print(parallel_table(result))
    text = console.export_text()
    for part in (
        "link in this run: 400.0 GB/s a direction (copies)",
        "not run: slot: no",
        "native folded",
        "torch 2.11",
    ):
        assert part in text


def test_ranks_that_wait_for_the_slower_one_do_not_communicate() -> None:
    waits = replace(ROW, skew=1.05)  # 25 of 40 us
    assert waits.overlap == pytest.approx(1 - 15 / 50)


def test_slow_steps_take_fewer_rounds_and_all_ranks_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def gather(everybody: list[dict[str, float]], mine: dict[str, float]) -> None:
        everybody[:] = [mine, {"fast": 1e-3, "slow": 0.02}]

    monkeypatch.setattr(timing.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(timing.dist, "all_gather_object", gather)
    assert timing._rounds({"fast": 1e-3, "slow": 1e-3}, 10) == {"fast": 10, "slow": 4}
    assert timing._rounds({"fast": 1.0, "slow": 1.0}, 10) == {"fast": timing.LEAST, "slow": timing.LEAST}


def test_results_become_constants_and_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [ROW, replace(ROW, tokens=8, dispatch=19e-6, combine=29e-6, total=520e-6), replace(ROW, arm="dual-stream")]
    result = ParallelResult(ParallelRequest("A", (128, 8)), "what", "spec", 2, "hopper", 3.8e11, "copies", {}, rows)
    result.save(tmp_path / "A.json")
    fit.main([str(tmp_path / "A.json")])
    printed = capsys.readouterr().out
    assert '"symmetric": Exchange(Cost(18.8e-6, 0.0e-12), Cost(28.1e-6, 0.0e-12), 0.0e-6),' in printed
    assert "Shape A, 380 GB/s" in printed
    assert "| 128 | symmetric | 20.0 | 500 | 30.0 | 540 | 1.06 | 20% |" in printed
    assert "| 128 | symmetric | 540 | 540 |" in printed


def test_virtual_ranks_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SHAPES["cpu"].spec
    small = replace(spec, hidden=128, routed=replace(spec.routed, count=4, width=32), top_k=3)
    monkeypatch.setitem(
        SHAPES, "cpu", replace(SHAPES["cpu"], spec=replace(small, shared=replace(spec.shared, width=32)))
    )  # type: ignore[type-var]
    request = ParallelRequest("cpu", (1, 5), arms=("folded",), schemes=("native",), rounds=1, ranks=3)
    found = list(virtual.measure(request, torch.device("cpu")))
    assert [(tokens, arm, len(seconds), rows) for tokens, arm, seconds, rows in found] == [
        (1, "folded", 3, 3),
        (1, "remap", 1, 1),
        (1, "rank_routes", 1, 3),
        (1, "rank_routes, slot", 1, 3),
        (5, "folded", 3, 15),
        (5, "remap", 1, 5),
        (5, "rank_routes", 1, 15),
        (5, "rank_routes, slot", 1, 15),
    ]
    assert all(each > 0 for _, _, seconds, _ in found for each in seconds)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ParallelRequest("Z", (1,)), "no shape 'Z'"),
        (ParallelRequest("cpu", (1,), transports=("pigeon",)), "no transport 'pigeon'; there are: allgather, alltoall"),
        (ParallelRequest("cpu", (0,)), r"tokens must be numbers from 1 up, found \[0\]"),
    ],
)
def test_what_cannot_be_asked(request_: ParallelRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(request_)
