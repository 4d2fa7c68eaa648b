"""``foldmoe plan``: a table for people, JSON for machines, errors without a traceback."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from foldmoe.checkpoint.generate import generate
from foldmoe.cli.main import app
from foldmoe.planner import plan_checkpoint
from foldmoe.report.plan_table import runs
from tests.support.sparse import v4_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

WIDE = {"COLUMNS": "300"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    v4_checkpoint(tmp_path, hidden=256, width=128, layers=5, experts=8, block=128, drafts=1, draft_experts=4)
    return tmp_path


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments], env=WIDE)
    return done.exit_code, done.output


def test_identical_layers_collapse_and_the_summary_is_one_line(folder: Path) -> None:
    code, output = run(str(folder), "--device", "cpu", "--ep", "2")
    assert code == 0
    assert "layers.0..4.ffn" in output
    assert "mtp.0.ffn" in output
    assert "draft" in output
    assert "EP 2" in output
    assert "8x128 mxfp4" in output
    assert "6/6 layers fold natively, +0 B" in output
    assert plan_checkpoint(folder, device="cpu", ep_size=2).digest in output


def test_ranks_show_what_their_exchanges_take(folder: Path) -> None:
    """H 256, E4M3 rows: the bytes of an all-gather, written out."""
    layer = plan_checkpoint(folder, device="h200", ep_size=4).layers[0]
    row = 256 + 2 + layer.spec.top_k * 8  # values, scales, ids and weights
    row = -(-row // 16) * 16
    held = 64 * 4
    expected = 64 * row + held * (row + layer.spec.top_k * 8 + 3 * 256 * 2)  # three: local x and results, received
    code, output = run(str(folder), "--device", "h200", "--ep", "4", "--tokens", "8,64")
    assert code == 0
    line = "buffers a rank at 64 tokens, worst routing, shared by all layers: "
    assert f"{line}all_gather {expected:,} B, all_to_all " in output
    assert "buffers a rank at 2,048 tokens" in run(str(folder), "--device", "h200", "--ep", "4")[1]
    assert "buffers a rank" not in run(str(folder), "--device", "h200")[1]
    assert "buffers a rank" not in run(str(folder), "--device", "h200", "--ep", "4", "--tp", "2")[1]
    assert run(str(folder), "--device", "h200", "--ep", "4", "--estimate")[1].count("buffers a rank") == 1


def test_case_93_reasons_are_visible_by_default(folder: Path) -> None:
    code, output = run(str(folder), "--device", "cpu", "--fold", "slot")
    assert code == 0
    assert "layers.0..4.ffn: slot: requantising fp8_128x128 -> mxfp4 lowers precision" in output
    assert "note: model.safetensors.index.json is missing" in output
    assert "6/6 layers do not fold" in output


def test_the_environment_asks_as_it_does_of_a_server_and_the_command_line_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDMOE_FOLD", "off")
    assert "6/6 layers do not fold" in run(str(folder), "--device", "cpu")[1]
    assert "6/6 layers fold natively" in run(str(folder), "--device", "cpu", "--fold", "auto")[1]


def test_requantising_by_name_is_shown_as_such(folder: Path) -> None:
    _, output = run(str(folder), "--device", "cpu", "--fold", "slot", "--allow-requantize")
    assert "shared requantised" in output
    assert "6/6 layers fold into a slot, -" in output


def test_json_is_the_plan(folder: Path) -> None:
    code, output = run(str(folder), "--device", "h200", "--tp", "2", "--json", "--activations", "bf16")
    found = json.loads(output)
    assert code == 0
    assert found["device"] == "h200"
    assert {layer["activations"] for layer in found["layers"]} == {"bf16"}
    assert len(found["layers"]) == 6


def test_what_is_not_read_and_what_is_gated_are_shown(tmp_path: Path) -> None:
    _, output = run(str(generate("kimi-int4", tmp_path / "kimi")), "--device", "cpu")
    assert "not read" in output
    assert "weight_packed I32" in output
    _, output = run(str(generate("qwen", tmp_path / "qwen")), "--device", "cpu")
    assert "1x96 bf16 gated" in output


def test_errors_are_for_people(folder: Path, tmp_path: Path) -> None:
    for arguments, message in (
        ((str(tmp_path / "gone"),), "no such folder or file"),
        ((str(folder), "--fold", "sideways"), "fold must be one of auto, native, slot"),
        ((str(folder), "--device", "h900"), "unknown device 'h900'"),
        ((str(folder), "--backend", "nobody"), "no backend called 'nobody'"),
        ((str(folder), "--ep", "0"), "ep_size 0"),
        ((str(folder), "--device", "mps"), "no layer of ours runs on mps"),
        ((str(folder), "--tokens", "0"), "--tokens must be at least 1, found 0"),
        ((str(folder), "--link", "ib400"), "--link without --estimate"),
        ((str(folder), "--measured", "none.json", "--efficiency", "1"), "--efficiency, --measured without --estimate"),
        ((str(folder), "--estimate", "--device", "h200", "--efficiency", "nan"), "efficiency must lie between 0 and 1"),
        ((str(folder), "--estimate", "--device", "h200", "--link", ""), "unknown link ''"),
    ):
        code, output = run(*arguments)
        assert code == 2
        assert message in output
        assert "Traceback" not in output


def test_runs_that_differ_in_more_than_one_number_show_both_ends(folder: Path) -> None:
    plan = plan_checkpoint(folder, device="cpu")
    first, draft = runs(plan.rows)
    assert (first.label, len(first.rows), draft.label) == ("layers.0..4.ffn", 5, "mtp.0.ffn")
    assert draft.digest == plan.rows[-1].digest
    assert first.digest != plan.rows[0].digest
    odd = type(first)((plan.rows[0], plan.rows[-1]))
    assert odd.label == "layers.0.ffn .. mtp.0.ffn"


def test_an_empty_checkpoint_has_a_summary_too(tmp_path: Path) -> None:
    from tests.support.sparse import write_header

    write_header(tmp_path / "a.safetensors", [("model.norm.weight", "BF16", (4,))])
    code, output = run(str(tmp_path), "--device", "cpu")
    assert (code, "no MoE layers: nothing to fold" in output) == (0, True)


@pytest.mark.parametrize("name", ["c_[bold]", "x[", "[/y]", "a:smile:b"])
def test_a_folder_is_called_by_its_name_whatever_it_looks_like(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.mkdir(parents=True)
    v4_checkpoint(path, hidden=256, width=128, layers=1, experts=4, block=128, drafts=0, draft_experts=0)
    code, output = run(str(path), "--device", "cpu")
    assert code == 0, output
    assert f"{path}on cpu".replace(" ", "") in "".join(output.split())  # the title is as narrow as its table
