"""Results of several processes in one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from foldmoe.bench.serve import summary
from foldmoe.bench.serve.merging import merge
from foldmoe.bench.serve.results import Failure, ServeResult
from foldmoe.bench.serve.runner import RESULT
from foldmoe.cli.main import app
from tests.bench_serve.support import NAME, asked, run

if TYPE_CHECKING:
    from pathlib import Path


def served(*arms: str, speed: float = 100.0, again: str | None = None) -> ServeResult:
    result = asked("serve", arms, again=again)
    result.runs = [run(arm, 1, speed) for arm in result.served]
    result.complete = True
    return result


def test_arms_of_two_gpus_are_compared_in_one_result() -> None:
    both = merge({"a": served("serial", speed=100.0), "b": served("folded", speed=110.0)})
    assert both.arms == ("serial", "folded")
    change = summary.change(both, "serial", "folded", NAME, summary.THROUGHPUT)
    assert change is not None
    assert change.relative == pytest.approx(0.1)
    assert both.complete


def test_an_arm_that_both_served_is_the_noise_floor_and_holds_the_gpus_difference() -> None:
    both = merge({"a": served("serial", "folded", speed=100.0), "b": served("dual-stream", "folded", speed=97.0)})
    assert both.served == ("serial", "folded", "dual-stream", "folded-again")
    assert summary.noise(both, NAME, summary.THROUGHPUT) == pytest.approx(0.03)


def test_the_results_that_were_merged_stay_as_they_were() -> None:
    one = served("serial")
    merge({"a": one, "b": served("folded")})
    assert one.arms == ("serial",)
    assert len(one.runs) == 1


def test_failures_come_along_and_nothing_is_complete_that_lacks_runs() -> None:
    broken = served("folded")
    broken.complete, broken.failures = False, [Failure("folded", 1, "start", "it ran out of memory")]
    both = merge({"a": served("serial"), "b": broken})
    assert [failure.arm for failure in both.failures] == ["folded"]
    assert not both.complete


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(served("folded"), serve_cmd="serve --other"), "serve_cmd is 'serve --other', not 'serve'"),
        (replace(served("folded"), versions={"vllm": "0.33"}), "versions is"),
        (replace(served("folded"), warm="largest"), "warm is 'largest'"),
        (served("serial", again="serial"), "serves serial once more"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_the_difference(other: ServeResult, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        merge({"a": served("serial"), "b": other})


def test_two_noise_floors_are_refused() -> None:
    with pytest.raises(ValueError, match="noise floor of its own"):
        merge({"a": served("serial", again="serial"), "b": served("folded", again="folded")})


def test_an_arm_of_another_version_is_named_before_anything_is_written(tmp_path: Path) -> None:
    for name, arm in (("a", "serial"), ("b", "triple-stream")):
        (tmp_path / name).mkdir()
        served(arm).save(tmp_path / name / RESULT)
    file = tmp_path / "b" / RESULT
    for words in (
        ["bench", "merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "out")],
        ["report", str(file), "--out", str(tmp_path / "out")],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2, done.output
        assert f"foldmoe: {file}: no arm triple-stream; there are: stock-serial, " in done.output
        assert not (tmp_path / "out").exists()


def test_the_command_prints_the_table_and_keeps_an_earlier_result(tmp_path: Path) -> None:
    for name, arm in (("a", "serial"), ("b", "folded")):
        (tmp_path / name).mkdir()
        served(arm).save(tmp_path / name / RESULT)
    words = ["bench", "merge", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "both")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "ours serial -> ours folded" in done.output
    assert ServeResult.load(tmp_path / "both" / RESULT).arms == ("serial", "folded")
    again = CliRunner().invoke(app, words)
    assert again.exit_code != 0
    assert "exists" in again.output
