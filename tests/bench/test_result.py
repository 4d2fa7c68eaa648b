"""Saved layer results: read back as written, refused by field where damaged, asked again by one command."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from foldmoe.bench.ceilings import Ceilings
from foldmoe.bench.compare import compare
from foldmoe.bench.result import LayerResult, Request, Row
from foldmoe.cli.bench import app as bench
from foldmoe.cli.main import app
from tests.support.results import layer_result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_saved_result_reads_back_equal(tmp_path: Path) -> None:
    result, path = layer_result(), tmp_path / "new" / "folders" / "r.json"
    result.save(path)
    assert LayerResult.load(path) == result
    assert json.loads(path.read_text())["command"] == result.request.command


def test_a_broken_arms_error_survives_the_file(tmp_path: Path) -> None:
    result = layer_result()
    result.rows[0] = replace(result.rows[0], error=float("nan"))
    result.save(tmp_path / "r.json")
    found = LayerResult.load(tmp_path / "r.json").rows[0].error
    assert found is not None
    assert math.isnan(found)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: f.pop("kind"), "should be a JSON object with a 'kind'"),
        (lambda f: f.update(kind="bench-serve"), "holds 'bench-serve'; expected 'bench-layer'"),
        (lambda f: f.pop("ceilings"), "no 'ceilings'"),
        (lambda f: f.update(surprise=1), "unknown surprise"),
        (lambda f: f["rows"][0].update(seconds="fast"), r"rows\[0\]: seconds: 'fast'; expected float"),
        (lambda f: f["rows"][0].update(tokens=True), r"rows\[0\]: tokens: True; expected int"),
        (lambda f: f["request"].update(tokens=[1, None]), r"request: tokens\[1\]: None; expected int"),
        (lambda f: f.update(versions=[]), r"versions: \[\]; expected dict"),
    ],
)
def test_damage_is_refused_by_field(tmp_path: Path, damage: Callable[[dict[str, Any]], object], message: str) -> None:
    path = tmp_path / "r.json"
    layer_result().save(path)
    found = json.loads(path.read_text())
    damage(found)
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=message):
        LayerResult.load(path)


def test_what_is_no_json_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(ValueError, match=r"r\.json is no result file: it is not JSON"):
        LayerResult.load(tmp_path / "r.json")


def test_every_field_of_a_request_is_an_option() -> None:
    """Or the command that a file carries would not ask the same again."""
    command: Any = typer.main.get_command(bench)
    options = {flag for option in command.commands["layer"].params for flag in option.opts}
    assert {f"--{field.name.replace('_', '-')}" for field in fields(Request)} <= options


def test_the_command_leaves_defaults_out_and_quotes() -> None:
    request = Request("A", (1, 8), arms=("folded", "serial"), rounds=5, device="cuda:1")
    words = "foldmoe bench layer --shape A --tokens 1,8 --arms folded,serial --rounds 5 --device cuda:1"
    assert shlex.split(request.command) == words.split()
    assert "--backend" not in request.command


def test_the_saved_command_measures_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def run(request: Request, _: object) -> LayerResult:
        asked.append(request)
        return layer_result()

    monkeypatch.setattr("foldmoe.bench.layer.run", run)
    request = Request("C", (3,), backend="hopper", rounds=7, inputs=2, activations="bf16", device="cpu")
    done = CliRunner().invoke(app, shlex.split(request.command)[1:])
    assert done.exit_code == 0, done.output
    assert asked == [request]


def _moved(result: LayerResult, by: float, **changes: Any) -> LayerResult:
    return replace(result, rows=[replace(row, seconds=row.seconds * by, **changes) for row in result.rows])


def test_only_moves_past_the_noise_of_both_are_marked() -> None:
    old = layer_result()  # every row 1 % noise
    verdicts = {by: {c.verdict for c in compare(old, _moved(old, by)).changes} for by in (0.9, 0.99, 1.0, 1.019, 1.03)}
    assert verdicts == {
        0.9: {"faster"},
        0.99: {"within noise"},
        1.0: {"within noise"},
        1.019: {"within noise"},
        1.03: {"slower"},
    }
    assert {c.verdict for c in compare(old, _moved(old, 1.03, noise=0.03)).changes} == {"within noise"}


def test_rows_of_one_result_alone_are_new_or_gone() -> None:
    old = layer_result()
    new = replace(old, rows=[*old.rows[1:], replace(old.rows[0], arm="triton folded")])
    found = compare(old, new)
    assert [c.verdict for c in found.changes][-2:] == ["new", "gone"]
    assert found.changes[-1].row == old.rows[0]
    assert found.regressions == ()


@pytest.mark.parametrize(("rows", "said"), [([], "before, no row"), (None, "before, hopper folded, .* at 1 tokens")])
def test_results_without_a_row_in_common_are_no_comparison(rows: list[Row] | None, said: str) -> None:
    old, new = layer_result(tokens=(1,)), layer_result(tokens=(8,))
    old = old if rows is None else replace(old, rows=rows)
    with pytest.raises(ValueError, match=rf"nothing to compare: .*{said}; after, hopper folded, .* at 8 tokens"):
        compare(old, new)


def test_a_time_that_is_no_number_is_not_called_faster() -> None:
    old = layer_result()
    assert {c.verdict for c in compare(old, _moved(old, float("nan"))).changes} == {"slower"}


def test_too_few_rounds_give_no_verdict() -> None:
    old = layer_result(rounds=3)
    found = compare(old, _moved(old, 2.0))
    assert {(c.verdict, c.noise) for c in found.changes} == {("too few rounds", None)}
    assert found.compared == 0


def test_what_else_differs_is_said() -> None:
    old = layer_result()
    new = replace(old, versions=old.versions | {"triton": "3.7.1"}, ceilings=Ceilings(4.1e12, 1.4e15, "fp8"))
    found = compare(old, new).differences
    assert "triton: 3.6.0 before, 3.7.1 after" in found
    assert any(line.startswith("ceiling read_bandwidth: 4,620") for line in found)
    assert compare(old, old).differences == ()


def test_other_layers_are_not_compared() -> None:
    old = layer_result()
    with pytest.raises(ValueError, match="two layers cannot be compared"):
        compare(old, replace(old, spec="H 1"))


@pytest.mark.parametrize(
    ("by", "status", "line"),
    [(1.5, 1, "21 rows slower by more than the noise, 21 of 21"), (1.0, 0, "no row is slower, 21 of 21 rows compared")],
)
def test_the_command_marks_regressions_and_says_so_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: float, status: int, line: str
) -> None:
    old = layer_result()
    old.save(tmp_path / "old.json")
    monkeypatch.setattr("foldmoe.bench.layer.run", lambda *_: _moved(old, by))
    done = CliRunner().invoke(app, ["bench", "layer", "--compare", str(tmp_path / "old.json")], env={"COLUMNS": "200"})
    assert done.exit_code == status, done.output
    assert line in done.output


def test_a_comparison_that_judges_nothing_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer_result().save(tmp_path / "old.json")
    monkeypatch.setattr("foldmoe.bench.layer.run", lambda *_: layer_result(rounds=3))
    done = CliRunner().invoke(app, ["bench", "layer", "--compare", str(tmp_path / "old.json")], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert "foldmoe: nothing was judged: expected at least 4 rounds in both results" in done.output
    assert "no row was judged, 0 of 21 rows compared" in done.output
    assert "no row is slower" not in done.output
    assert "unknown" in done.output
    assert "0.0%" not in done.output.replace("+0.0%", "")


def test_a_missing_old_result_is_said_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foldmoe.bench.layer.run", lambda *_: pytest.fail("timed"))
    done = CliRunner().invoke(app, ["bench", "layer", "--compare", "none.json"])
    assert done.exit_code == 2
    assert "none.json" in done.output
