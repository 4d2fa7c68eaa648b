"""Results: shares of broken answers, the file, and what the tables print of both."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from foldmoe.evaluate.request import Request
from foldmoe.evaluate.result import ArmResult, EvalResult, Finish, LayerError, Sample, TaskResult, load
from foldmoe.evaluate.skills import SKILLS, runs_past_end
from foldmoe.report.eval_table import eval_report

if TYPE_CHECKING:
    from pathlib import Path


def replies(*ends: Finish, text: str = " 4 + 8 = 12.\n#### 12") -> TaskResult:
    skill = SKILLS["arithmetic"]
    return TaskResult(
        tuple(
            Sample(i, f"h{i}", skill.scores(text, "12"), text, end, 9, runs_past_end(text, skill.strict))
            for i, end in enumerate(ends)
        ),
        "1",
        256,
    )


def result(**arms: TaskResult) -> EvalResult:
    return EvalResult(
        source="tiny",
        request=Request(arms=tuple(arms), items=3),
        baseline=next(iter(arms)),
        arms=tuple(
            ArmResult(
                arm,
                f"{arm} on torch 1/1",
                {"arithmetic": task},
                (LayerError("layers.0.ffn", f"{arm} on torch", 1.7e-3, 0.13, 6e-3),),
            )
            for arm, task in arms.items()
        ),
        harness="lm-eval 0.4.13",
        versions={"torch": "2.13.0"},
    )


def printed(found: EvalResult, width: int = 150) -> str:
    screen = Console(width=width)
    with screen.capture() as capture:
        screen.print(eval_report(found))
    return capture.get()


def test_case_88_two_of_three_replies_stop_by_length() -> None:
    """A library update halved the scores of others: answers had been cut at 256 tokens. Limit, share, version show."""
    task = replies("length", "stop", "length")
    assert task.cut == pytest.approx(2 / 3)
    shown = printed(result(serial=task, native=task))
    assert "66.7%" in shown
    assert "256" in shown
    assert "lm-eval 0.4.13" in shown
    assert "torch 2.13.0" in shown


def test_case_88_answers_cut_by_length_are_counted_apart() -> None:
    right, cut = replies("stop").samples[0], replies("length", text=" 4 + 8").samples[0]
    task = TaskResult((right, cut), token_limit=256)
    assert task.score("strict-match") == 0.5
    assert task.score("strict-match", ended=True) == 1.0
    assert replies("length").score("strict-match", ended=True) is None


def test_case_89_strict_and_flexible_and_what_runs_past_the_end() -> None:
    task = replies("stop", text="#### 12 <eof> 99")
    assert task.samples[0].scores == {"strict-match": 1.0, "flexible-extract": 0.0}
    assert task.past_end == 1.0
    assert replies("stop").past_end == 0.0
    shown = printed(result(serial=replies("stop"), native=task))
    assert "strict-match" in shown
    assert "flexible-extract" in shown
    assert "100.0%" in next(line for line in shown.splitlines() if "native" in line and "256" in line)


@pytest.mark.parametrize(
    ("text", "past"),
    [("#### 12", False), ("#### 12.\n", False), ("#### 12\nQuestion: and then", True), ("12 and more", False)],
)
def test_only_text_after_the_final_answer_is_past_the_end(text: str, past: bool) -> None:
    assert runs_past_end(text, SKILLS["arithmetic"].strict) is past


def test_the_match_that_counts_is_where_the_end_is() -> None:
    text = "Answer: A\nNo, wait.\nAnswer: B"
    assert runs_past_end(text, r"Answer: (\w)", 0)
    assert not runs_past_end(text, r"Answer: (\w)", -1)


def test_empty_answers_are_counted() -> None:
    assert replies("stop", "stop", text="  \n").empty == 1.0


def test_a_server_that_does_not_say_why_it_stopped_gives_a_lower_bound() -> None:
    task = replies("unknown", "length")
    assert not task.finish_known
    assert "at least 50.0%" in printed(result(serial=task))


def test_the_file_gives_back_what_was_saved(tmp_path: Path) -> None:
    found = result(serial=replies("stop", "length"), native=replies("stop", "stop"))
    found.save(tmp_path / "eval.json")
    assert load(tmp_path / "eval.json") == found


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    path.write_text(json.dumps({"kind": "bench-layer"}))
    with pytest.raises(ValueError, match=r"holds 'bench-layer'; expected 'eval'"):
        load(path)


def test_layer_errors_come_first_and_the_cost_of_lower_precision_shows() -> None:
    shown = printed(result(serial=replies("stop"), native=replies("stop")))
    assert shown.index("relative error of the layers") < shown.index("scores, paired with serial")
    assert "1.3e-01" in shown
    assert "native against serial: " in shown


@pytest.mark.filterwarnings("error")
def test_one_item_is_said_to_be_one_and_has_no_error_bar() -> None:
    pytest.importorskip("scipy")
    shown = printed(result(serial=replies("stop"), native=replies("stop")))
    assert "100.0%, one item" in shown
    assert "nan" not in shown
    assert "100.0% ± 0.0%" in printed(result(serial=replies("stop", "stop")))


def test_in_a_narrow_terminal_cells_are_folded_and_not_cut() -> None:
    task = replies("stop", "length")
    assert "…" not in printed(result(serial=task, native=task), width=60)


def test_a_task_without_scores_of_single_items_leaves_the_note_and_the_layers() -> None:
    found = result(serial=replies("stop"), native=replies("stop"))
    note = "wikitext has no score of single items, so its arms cannot be paired; left out"
    bare = replace(found, arms=tuple(replace(arm, tasks={}) for arm in found.arms), notes=(note,))
    shown = printed(bare)
    assert f"note: {note}" in shown
    assert "relative error of the layers" in shown
    assert "how answers end" not in shown


def test_parts_of_a_task_that_fail_are_named() -> None:
    samples = tuple(
        Sample(i, f"h{i}", {"strict-match": float(i > 0)}, "t", "stop", group="512 tokens at 50%") for i in range(4)
    )
    assert "under 100 % at 512 tokens at 50% 75%" in printed(result(serial=TaskResult(samples, token_limit=16)))


def test_an_arm_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="no arm 'folded'; there are: serial"):
        result(serial=replies("stop")).arm("folded")
