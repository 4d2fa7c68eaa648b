"""``foldmoe demo``, ``doctor`` and ``eval``: the whole way on the trained checkpoint, with few items."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from foldmoe import demo
from foldmoe.cli.main import app
from foldmoe.evaluate.result import load
from foldmoe.evaluate.statistics import judge

WIDE = {"COLUMNS": "160"}


def test_the_trained_checkpoint_is_small_and_in_the_stored_format() -> None:
    from foldmoe.checkpoint import read_headers

    assert sum(path.stat().st_size for path in demo.TINY_V4.iterdir()) < 12e6
    tensors = read_headers(demo.TINY_V4).tensors
    assert tensors["layers.0.ffn.experts.0.w1.weight"].dtype == "I8"
    assert tensors["layers.0.ffn.experts.0.w1.scale"].dtype == "F8_E8M0"
    assert tensors["layers.0.ffn.shared_experts.w1.weight"].dtype == "F8_E4M3"
    assert "layers.0.ffn.gate.tid2eid" in tensors


def test_demo_folds_three_ways_and_the_answers_agree() -> None:
    pytest.importorskip("transformers")
    done = CliRunner().invoke(app, ["demo", "--items", "2", "--device", "cpu"], env=WIDE)
    assert done.exit_code == 0, done.output
    assert "5/5 layers fold natively, +0 B" in done.output
    rows = {m[1].strip(): m[2] for m in re.finditer(r"│ (serial|native|slot, requantised) +│ (.+)", done.output)}
    assert set(rows) == {"serial", "native", "slot, requantised"}
    for arm, row in rows.items():
        assert row.count("100%") == 2, (arm, row)
    same = re.search(r"(\d+)/(\d+)", rows["native"].split("│")[4])
    assert same is not None
    assert same[1] == same[2]


def test_demo_runs_on_random_weights_where_the_trained_ones_were_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(demo, "TINY_V4", Path("nowhere"))
    done = CliRunner().invoke(app, ["demo", "--device", "cpu"], env=WIDE)
    assert done.exit_code == 0, done.output
    assert "nothing to ask this model" in done.output


def test_eval_finds_serial_and_native_alike_and_a_missing_shared_expert(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "eval.json"
    words = ["eval", "--items", "3", "--device", "cpu", "--arms", "serial,native,shared-zeroed", "--out", str(out)]
    done = CliRunner().invoke(app, words, env=WIDE)
    assert done.exit_code == 0, done.output
    assert "native against serial: n too small to tell" in done.output  # three items are

    found = load(out)
    assert [arm.resolved for arm in found.arms] == [
        "serial on torch 5/5", "native on torch 5/5", "Transformers' own layers"
    ]  # fmt: skip
    native, zeroed = judge(found)
    for (task, metric), pair in native.pairs.items():
        assert (pair.same, pair.lost, pair.won) == (3, 0, 0)
        assert found.arm("native").tasks[task].score(metric) == 1.0
    assert all((pair.lost, pair.won) == (3, 0) for pair in zeroed.pairs.values())
    worst = found.arm("native").worst_layer
    assert worst is not None
    assert 0 < worst.reference < worst.allowed


def test_eval_refuses_arms_that_are_not_there() -> None:
    done = CliRunner().invoke(app, ["eval", "--arms", "serial,folded"], env=WIDE)
    assert done.exit_code == 2
    assert "no arm folded; there are: transformers, serial" in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("demo", "--items", "-1"), "--items must be at least 0, found -1"),
        (("demo", "--device", "h200"), "'foldmoe plan --device h200' plans for it without it. Here: cpu"),
        (("eval", "--device", "foo"), "device 'foo' is unknown to torch. Here: cpu"),
        (("eval", "--items", "0"), "--items must be at least 1, found 0"),
        (("eval", "--arms", "native,"), "--arms takes names with commas between; found 'native,'"),
        (("eval", "--tasks", ""), "--tasks takes names with commas between; found ''"),
        (("bench", "layer", "--device", "mps"), "device 'mps': layers run on 'cpu' or 'cuda'"),
        (("bench", "layer", "--arms", ""), "--arms takes names with commas between; found ''"),
        (("warmup", str(demo.TINY_V4), "--device", "h200", "--tokens", ""), "--tokens takes whole numbers"),
        (("warmup", str(demo.TINY_V4), "--device", "h200", "--tokens", "0"), "--tokens must be at least 1, found 0"),
    ],
)
def test_options_that_mean_nothing_are_named_in_a_line(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(app, list(words), env=WIDE)
    assert done.exit_code == 2, done.output
    assert said in done.output


def test_doctor_says_what_runs_and_why_not_more() -> None:
    done = CliRunner().invoke(app, ["doctor"], env=WIDE)
    assert done.exit_code == 0, done.output
    assert re.search(r"yes │ backend torch", done.output)
    assert "fold auto, as stored, activations checkpoint, backend auto" in done.output


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FOLDMOE_FLOD", "native", "unknown FOLDMOE_FLOD"),
        ("FOLDMOE_BACKEND", "hoper", "no backend called 'hoper'; there are: hopper, triton, torch"),
    ],
)
def test_doctor_names_what_is_misspelt(name: str, value: str, said: str) -> None:
    done = CliRunner().invoke(app, ["doctor"], env=WIDE | {name: value})
    assert done.exit_code == 2
    assert said in done.output
