"""Multiple-choice data sets as questions, and the last answer line of a reply to them."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="foldmoe[eval] is not installed")
pytest.importorskip("transformers")

import datasets

from foldmoe.evaluate.harness import TASKS
from foldmoe.evaluate.tasks import questions
from tests.evaluate.asking import ask


def test_choices_are_shuffled_by_the_question_alone() -> None:
    first = questions.multiple_choice("Which?", "right", ["a", "b", "c"])
    assert first == questions.multiple_choice("Which?", "right", ["a", "b", "c"])
    assert f"{first['answer']}) right" in first["prompt"]
    letters = {questions.multiple_choice(f"Which {i}?", "right", ["a", "b", "c"])["answer"] for i in range(40)}
    assert letters == set("ABCD")


def test_gpqas_columns_become_a_question_of_four_choices() -> None:
    """Rows as the data set has them; texts there begin and end with stray space."""
    rows = [
        {
            "Question": f"Which of {i} is even?\n",
            "Correct Answer": f" right {i} ",
            "Incorrect Answer 1": f"wrong {i}1\n",
            "Incorrect Answer 2": f"wrong {i}2",
            "Incorrect Answer 3": f"wrong {i}3",
            "Subdomain": "Number theory",
        }
        for i in range(20)
    ]
    found = questions.shuffled_gpqa(datasets.Dataset.from_list(rows))
    for i, doc in enumerate(found):
        assert f"\n\nWhich of {i} is even?\n\nA) " in doc["prompt"]
        assert "one of A, B, C, D." in doc["prompt"]
        choices = re.findall(r"^([A-Z])\) (.*)$", doc["prompt"], re.M)
        assert [letter for letter, _ in choices] == list("ABCD")
        assert dict(choices)[doc["answer"]] == f"right {i}"
        assert {text for _, text in choices} == {f"right {i}", *(f"wrong {i}{k}" for k in (1, 2, 3))}
    assert len(set(found["answer"])) == 4  # the right one has no place of its own


@pytest.mark.parametrize("options", [10, 4])
def test_mmlu_pros_columns_become_a_question_of_up_to_ten_choices(options: int) -> None:
    """Rows as the data set has them; the column ``answer`` is a letter of the stored order, not of the shuffled one."""
    letters = "ABCDEFGHIJ"[:options]
    rows = [
        {
            "question_id": i,
            "question": f"Which is {i}? ",
            "options": [f" {i} and {k}" for k in range(options)],
            "answer": letters[i % options],
            "answer_index": i % options,
            "cot_content": "",
            "category": "math",
            "src": "made up",
        }
        for i in range(2 * options)
    ]
    found = questions.shuffled_mmlu_pro(datasets.Dataset.from_list(rows))
    for i, doc in enumerate(found):
        assert f"one of {', '.join(letters)}." in doc["prompt"]
        choices = re.findall(r"^([A-Z])\) (.*)$", doc["prompt"], re.M)
        assert [letter for letter, _ in choices] == list(letters)
        assert dict(choices)[doc["answer"]] == f"{i} and {i % options}"
        assert sorted(text for _, text in choices) == sorted(f"{i} and {k}" for k in range(options))
        assert doc["category"] == "math"
    assert any(doc["answer"] != letters[doc["answer_index"]] for doc in found)


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        (
            "gpqa_diamond",
            [{"Question": "Q?", "Correct Answer": "r", **{f"Incorrect Answer {k}": f"w{k}" for k in (1, 2, 3)}}],
        ),
        (
            "foldmoe_mmlu_pro",
            [{"question": "Q?", "options": ["w1", "r", "w2"], "answer": "B", "answer_index": 1, "category": "law"}],
        ),
    ],
)
def test_thinking_tasks_score_a_reply_by_its_last_answer_line(
    task: str, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole task file over rows with the data set's columns, which stand in for the download."""
    split = "train" if "gpqa" in task else "test"
    made = datasets.DatasetDict({split: datasets.Dataset.from_list(rows)})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)

    def reply(body: dict[str, Any]) -> tuple[str, str]:
        right = re.search(r"^([A-Z])\) r$", body["messages"][-1]["content"], re.M)
        assert right is not None
        wrong = "B" if right[1] == "A" else "A"
        return f"Answer: {wrong}\nNo.\n**Answer: {right[1]}**", "stop"

    ours = task if task.startswith("foldmoe_") else f"foldmoe_{task}"
    found = ask(reply, tasks=(task,), chat=True).arms[0].tasks[ours]
    assert found.samples[0].scores == {"strict-match": 1.0, "flexible-extract": 1.0}


def test_the_answer_line_of_the_thinking_tasks() -> None:
    pattern = re.search(r"regex_pattern: '(.*Answer.*)'", (TASKS / "foldmoe_gpqa_diamond.yaml").read_text())
    assert pattern is not None
    for text in ("Answer: B", "so\n**Answer: B**", "answer:  (B)", "Answer: A\nno.\nAnswer: B"):
        assert re.findall(pattern[1], text)[-1] == "B", text
    assert not re.findall(pattern[1], "The answer: Because it is so")
