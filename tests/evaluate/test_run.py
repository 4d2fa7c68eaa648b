"""Runs in process and beside servers: which layers are checked, on what, and what is said where they are not."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from typer.testing import CliRunner

from foldmoe.cli.main import app
from foldmoe.evaluate import run as running
from foldmoe.evaluate.arms import ARMS, SERVED
from foldmoe.evaluate.request import Request, from_options
from foldmoe.evaluate.result import ArmResult, Sample, TaskResult, load
from foldmoe.evaluate.skills import TINY_V4, grouped_items
from foldmoe.planner import FusionPolicy
from foldmoe.report.eval_table import eval_report
from tests.evaluate.asking import Quiet
from tests.evaluate.serving import serve

if TYPE_CHECKING:
    from pathlib import Path

    from foldmoe.evaluate.result import EvalResult


class OneAnswer:
    """Stands for lm-eval, which need not be there: layers are no business of its."""

    notes: tuple[str, ...] = ()
    answers = 1

    def __init__(self, request: Request) -> None:
        pass

    def ask_server(self, arm: str, *_: Any) -> dict[str, TaskResult]:
        return {"foldmoe_needle": TaskResult((Sample(0, "h", {"strict-match": 1.0}, "1", "stop"),), token_limit=16)}


def served(monkeypatch: pytest.MonkeyPatch, arms: tuple[str, ...], **options: Any) -> EvalResult:
    monkeypatch.setattr(running.lm_eval_harness, "require", lambda: "lm-eval")
    monkeypatch.setattr(running.lm_eval_harness, "Harness", OneAnswer)
    with serve(lambda body: ("1", "stop")) as url:
        asked = from_options(server=dict.fromkeys(arms, url), tasks=("foldmoe_needle",), device="cpu", **options)
        return running.run(asked, Quiet())


def printed(found: EvalResult) -> str:
    from rich.console import Console

    screen = Console(width=400)
    with screen.capture() as capture:
        screen.print(eval_report(found))
    return capture.get()


def test_served_arms_of_a_local_checkpoint_report_their_layers_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = served(monkeypatch, ("serial", "native"), checkpoint=str(TINY_V4))
    for arm, how in (("serial", "serial on torch"), ("native", "native on torch")):
        layers = found.arm(arm).layers
        assert [layer.how for layer in layers] == [how] * 5
        assert all(0 < layer.reference <= layer.allowed and not layer.problems for layer in layers)
    shown = printed(found)
    assert shown.index("relative error of the layers") < shown.index("scores, paired with serial")
    assert "layer errors of serial, native were computed here, on cpu" in shown


@pytest.mark.parametrize(
    ("arm", "checkpoint", "reason"),
    [
        ("native", None, "no layer errors of native: no checkpoint was named; expected the folder"),
        ("native", "owner/name", "no layer errors of native: owner/name is no folder here; expected the folder"),
        ("stock", str(TINY_V4), "no layer errors of stock: this name stands for no policy of ours; names that do are"),
        ("shared-zeroed", str(TINY_V4), "no layer errors of shared-zeroed: this name stands for no policy of ours"),
    ],
)
def test_served_arms_without_layer_errors_say_why(
    arm: str, checkpoint: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = served(monkeypatch, (arm,), checkpoint=checkpoint)
    assert found.arms[0].layers == ()
    assert f"note: {reason}" in printed(found)


def test_the_folder_of_a_tokenizer_alone_is_a_note_and_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = served(monkeypatch, ("serial", "native"), checkpoint=str(tmp_path))
    assert found.notes == (
        f"no layer errors of serial, native: {tmp_path}: no *.safetensors file in this folder; other formats are not "
        "read",
    )


def test_a_device_without_room_beside_a_server_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.cuda.OutOfMemoryError("full")

    monkeypatch.setattr(running, "layer_errors", full)
    found = served(monkeypatch, ("native",), checkpoint=str(TINY_V4))
    assert "no layer errors of native: cpu has no room" in found.notes[0]
    assert isinstance(found.arms[0], ArmResult)
    assert found.arms[0].tasks


class NoAnswerFromSlot(OneAnswer):
    def ask_server(self, arm: str, *_: Any) -> dict[str, TaskResult]:
        if arm == "slot":
            raise ValueError(f"arm {arm}: the server failed: 400")
        return super().ask_server(arm)


@pytest.mark.parametrize("first", ["native", "slot"])
def test_the_arms_that_finished_before_one_that_failed_are_kept(
    first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running.lm_eval_harness, "require", lambda: "lm-eval")
    monkeypatch.setattr(running.lm_eval_harness, "Harness", NoAnswerFromSlot)
    out, arms = tmp_path / "eval.json", [first, *({"native", "slot"} - {first}), "serial"]
    with serve(lambda body: ("1", "stop")) as url:
        servers = [word for arm in arms for word in ("--server", f"{arm}={url}")]
        words = ["eval", *servers, "--tasks", "foldmoe_needle", "--device", "cpu", "--out", str(out)]
        done = CliRunner().invoke(app, words, env={"COLUMNS": "300"})
    assert done.exit_code == 2
    assert "foldmoe: arm slot: the server failed: 400" in done.output
    kept = f"foldmoe: arm slot did not finish; {out} holds those that did: native"
    assert (kept in done.output) == out.exists() == (first == "native")
    if out.exists():
        found = load(out)
        assert [arm.arm for arm in found.arms] == ["native"]
        assert found.arms[0].tasks["foldmoe_needle"].samples[0].text == "1"
        assert found.notes[0] == "arms that did not finish, and are left out: slot, serial"
        assert "foldmoe_needle: scores" in done.output


def test_a_result_that_cannot_be_shown_is_saved_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unpaired(_: EvalResult) -> None:
        raise ValueError("the arms were not asked the same")

    monkeypatch.setattr(running.lm_eval_harness, "require", lambda: "lm-eval")
    monkeypatch.setattr(running.lm_eval_harness, "Harness", OneAnswer)
    monkeypatch.setattr("foldmoe.cli.eval.eval_report", unpaired)
    out = tmp_path / "eval.json"
    with serve(lambda body: ("1", "stop")) as url:
        words = ["eval", "--server", f"native={url}", "--tasks", "foldmoe_needle", "--device", "cpu"]
        done = CliRunner().invoke(app, [*words, "--out", str(out)])
    assert done.exit_code == 2
    assert [arm.arm for arm in load(out).arms] == ["native"]


def test_names_of_served_arms_stand_for_the_policies_of_the_same_names() -> None:
    assert {name: arm.policy for name, arm in ARMS.items() if arm.policy} == {
        name: policy for name, policy in SERVED.items() if name in ARMS
    }
    for name in ("auto", "off", "dual", "native", "slot"):
        assert SERVED[name] == FusionPolicy(name)


def test_served_names_agree_with_the_arms_of_the_serving_benchmark() -> None:
    from foldmoe.bench.serve.arms import ARMS as BENCHED

    for name, arm in BENCHED.items():
        if arm.fold != "stock":
            assert SERVED[name].fold == arm.fold, name
        else:
            assert name not in SERVED


def test_slot_requantized_runs_and_its_layers_show_what_requantising_costs() -> None:
    pytest.importorskip("transformers")
    arms = ("native", "slot-requantized")
    found = running.run(Request(arms=arms, tasks=("needle",), items=1, device="cpu"), Quiet())
    slot, native = found.arm("slot-requantized"), found.arm("native")
    assert slot.resolved == "slot on torch, requantised 5/5"
    assert slot.tasks["needle"].score("strict-match") == 1.0
    assert len(slot.layers) == len(native.layers) == 5
    for lowered, kept in zip(slot.layers, native.layers, strict=True):
        assert lowered.stored is not None
        assert kept.stored is not None
        assert lowered.stored > 10 * kept.stored
        assert lowered.stored > 0.01
        assert lowered.reference <= lowered.allowed  # of what it holds it computes the right thing
        assert not lowered.problems


def test_the_seed_chooses_the_items(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(running, "layer_errors", lambda *_: ())  # takes seconds, and no seed of the request
    for seed in (2026, 7):
        request = Request(arms=("native",), tasks=("needle",), items=2, max_tokens=1, seed=seed, device="cpu")
        asked = running.run(request, Quiet())
        hashes = [sample.prompt_hash for sample in asked.arms[0].tasks["needle"].samples]
        expected = [item.prompt for _, item in grouped_items("needle", 2, seed)]
        assert hashes == [hashlib.sha256(prompt.encode()).hexdigest() for prompt in expected]
        assert f"seed {seed}" in printed(asked)
    assert from_options(arms=("native",)).seed == 2026
