"""Layer timings: rows are checked before they are timed, arms share their inputs, refusals are said."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from foldmoe import Format
from foldmoe.bench import ceilings, layer, shapes, timing
from foldmoe.bench.result import LayerResult
from foldmoe.cli.main import app
from foldmoe.report import bench_table

if TYPE_CHECKING:
    from pathlib import Path

    from foldmoe.moe import LayerSpec


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    for key, formats in {"small": (Format.BF16, Format.BF16), "small-v4": (Format.MXFP4, Format.FP8_128x128)}.items():
        spec = shapes._spec(64, 4, 32, *formats, top_k=2)
        monkeypatch.setitem(shapes.SHAPES, key, shapes.Shape("a small layer", spec))
    return "small"


def test_every_arm_is_checked_and_timed(small: str) -> None:
    result = layer.run(layer.Request(small, (1, 5), rounds=2, inputs=2, device="cpu"))
    arms = {"torch folded", "torch serial"} | ({"transformers eager"} if "transformers" in result.versions else set())
    assert arms <= {row.arm for row in result.rows}
    assert {row.tokens for row in result.rows} == {1, 5}
    for row in result.rows:
        assert row.error is not None
        assert row.error < 8e-3
        assert 0 < row.low <= row.seconds <= row.high
        assert row.floor > 0
    assert result.refused["dual-stream"] == "a CPU has no second stream"


def test_no_row_is_faster_than_its_floor(small: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading by a reduction may be slower than a layer's own reading."""
    monkeypatch.setattr(ceilings, "measure", lambda device, *, fp8: ceilings.Ceilings(1.0, 1.0, "bf16"))
    result = layer.run(layer.Request(small, (1, 5), ("folded",), rounds=2, inputs=2, device="cpu"))
    assert all(row.floor <= row.seconds * (1 + 1e-9) for row in result.rows)
    assert max(row.floor / row.seconds for row in result.rows) == pytest.approx(1)
    assert result.ceilings.matmul == max(row.teraflops for row in result.rows) * 1e12
    assert "GB/s read (by an arm), " in bench_table.remarks(result)[0]
    monkeypatch.setattr(ceilings, "measure", lambda device, *, fp8: ceilings.Ceilings(1e15, 1e18, "bf16"))
    result = layer.run(layer.Request(small, (1,), ("folded",), rounds=2, inputs=2, device="cpu"))
    assert result.ceilings == ceilings.Ceilings(1e15, 1e18, "bf16")
    assert all(row.floor < row.seconds for row in result.rows)
    assert "GB/s read, " in bench_table.remarks(result)[0]


def test_stock_is_refused_with_the_reason_where_weights_are_quantised(small: str) -> None:
    result = layer.run(layer.Request("small-v4", (3,), rounds=1, inputs=1, device="cpu"))
    assert "bf16" in result.refused["transformers"]
    assert all(row.error is not None and row.error < 6e-3 for row in result.rows)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (layer.Request("Z", (1,)), "no shape 'Z'"),
        (layer.Request("small", (1,), ("floded",)), "no arm 'floded'"),
        (layer.Request("small", (1,), ("folded", "serial", "folded")), "--arms names folded more than once"),
        (layer.Request("small", (4, 0)), "--tokens must be at least 1, found 4,0"),
        (layer.Request("small", ()), "--tokens must be at least 1, found none"),
        (layer.Request("small", (1,), inputs=0), "--inputs must be at least 1, found 0"),
        (layer.Request("small", (1,), rounds=-1), "--rounds must be at least 1, found -1"),
        (layer.Request("small", (1,), device="h200"), "'foldmoe plan --device h200' plans for it"),
        (layer.Request("small", (1,), device="foo"), "device 'foo' is unknown to torch"),
    ],
)
def test_what_cannot_be_timed_is_refused(small: str, request_: layer.Request, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer.run(request_)


def test_arms_alternate_and_the_first_rounds_are_thrown_away() -> None:
    order: list[str] = []
    arms: dict[str, timing.Step] = {name: (lambda turn, name=name: order.append(name)) for name in "ab"}
    found = timing.interleaved(arms, inputs=3, rounds=4, device=torch.device("cpu"))
    assert len(order) == 2 * (timing.WARM_UP + 4)
    assert all(set(order[i : i + 2]) == {"a", "b"} for i in range(0, len(order), 2))
    assert all(len(t.seconds) == 4 for t in found.values())


@pytest.mark.parametrize(("inputs", "rounds"), [(8, 20), (8, 4), (8, 24), (3, 6), (2, 10), (1, 4)])
def test_odd_rounds_run_the_same_inputs_as_even_ones(inputs: int, rounds: int) -> None:
    """Or the noise, one half against the other, would be the inputs'."""
    turns: list[int] = []
    timing.interleaved({"a": turns.append}, inputs=inputs, rounds=rounds, device=torch.device("cpu"))
    counted = turns[timing.WARM_UP :]
    assert sorted(counted[::2]) == sorted(counted[1::2])
    assert set(counted) == set(range(min(inputs, rounds // 2)))
    if inputs == 8 and rounds == 24:
        assert all(one != other for one, other in itertools.pairwise(counted)), "the second would run from a cache"


def test_noise_is_the_arm_against_itself() -> None:
    assert timing.Timing((1.0, 2.0, 1.0, 2.0)).noise == pytest.approx(1.0 / 1.5)
    assert timing.Timing((1.0, 1.0, 1.0, 1.0)).noise == 0.0


@pytest.mark.parametrize("format", [f for f in Format if f is not Format.NVFP4])
def test_random_weights_are_finite_and_of_the_usual_size(format: Format) -> None:
    spec = shapes.ExpertSpec(2, 96, format)
    weights = shapes.random_weights(spec, 128, torch.Generator().manual_seed(0))
    numbers = weights.gate_up.dequantize()
    assert torch.isfinite(numbers).all()
    assert 0.3 < float(numbers.std()) * 128**0.5 < 3


def test_the_floor_counts_distinct_experts() -> None:
    spec = shapes.SHAPES["B"].spec
    one = shapes.floor_bytes(spec, torch.zeros(4, 6, dtype=torch.int32))
    six = shapes.floor_bytes(spec, torch.arange(6, dtype=torch.int32).expand(4, 6))
    assert six - one == 5 * spec.routed.nbytes(spec.hidden)
    # V4-Flash at one token reads 105 MB: six routed experts and the shared one.
    assert shapes.floor_bytes(spec, torch.arange(6)[None]) == pytest.approx(105e6, rel=0.02)


def test_the_command_prints_a_table_and_writes_json(small: str, tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    command = [
        "bench",
        "layer",
        "--shape",
        small,
        "--tokens",
        "2",
        "--rounds",
        "1",
        "--device",
        "cpu",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "torch folded" in done.output
    assert "ceilings in this run" in done.output
    assert {row["tokens"] for row in json.loads(out.read_text())["rows"]} == {2}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "CUDA out of memory. Tried"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "RuntimeError: DefaultCPUAllocator"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_rows_before_a_size_that_fails_are_shown_and_kept(
    small: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, said: str
) -> None:
    real = shapes.random_batch

    def failing(spec: LayerSpec, tokens: int, generator: torch.Generator) -> shapes.Batch:
        if tokens == 5:
            raise error
        return real(spec, tokens, generator)

    monkeypatch.setattr(shapes, "random_batch", failing)
    code, output = _bench(small, "--tokens", "2,5,9", "--out", str(tmp_path / "r.json"))
    assert code == 1
    assert "torch folded" in output
    assert "not run: 5 tokens: " in output
    assert "foldmoe: stopped at 5 tokens: " in output
    assert said in output
    assert {row.tokens for row in LayerResult.load(tmp_path / "r.json").rows} == {2}


def test_nothing_timed_is_a_failure_with_the_reason(small: str, tmp_path: Path) -> None:
    code, output = _bench(small, "--arms", "dual-stream", "--out", str(tmp_path / "r.json"))
    assert code == 1
    assert "foldmoe: nothing was timed: dual-stream: a CPU has no second stream" in output
    assert not (tmp_path / "r.json").exists()


def _bench(shape: str, *options: str) -> tuple[int, str]:
    command = ["bench", "layer", "--shape", shape, "--rounds", "1", "--inputs", "1", "--device", "cpu", *options]
    done = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    return done.exit_code, done.output
