"""lm-eval as the one who asks: our tasks, foreign tasks, in process and served, and what becomes of every answer."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("lm_eval", reason="foldmoe[eval] is not installed")
pytest.importorskip("transformers")

from foldmoe.evaluate import skills
from foldmoe.evaluate.harness import TASKS
from foldmoe.evaluate.request import Request
from foldmoe.evaluate.run import run
from foldmoe.evaluate.statistics import judge
from tests.evaluate.asking import Quiet, ask
from tests.evaluate.serving import Reply, serve

if TYPE_CHECKING:
    from pathlib import Path


OURS = ("foldmoe_needle", "foldmoe_arithmetic")


@pytest.mark.parametrize("task", skills.SKILLS)
def test_the_lm_eval_tasks_and_our_own_scoring_are_the_same(task: str) -> None:
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value)
    config = yaml.load((TASKS / f"foldmoe_{task}.yaml").read_text(), Loader)
    strict, flexible = (entry["filter"][0] for entry in config["filter_list"])
    skill = skills.SKILLS[task]
    assert (strict["regex_pattern"], flexible["regex_pattern"]) == (skill.strict, skill.flexible)
    assert (strict.get("group_select", 0), flexible["group_select"]) == (0, -1)
    assert config["generation_kwargs"]["max_gen_toks"] == skill.token_limit


def test_in_process_lm_eval_finds_what_our_own_scoring_finds() -> None:
    steps = Quiet()
    asked = run(Request(arms=("serial",), tasks=OURS, items=2, device="cpu"), steps)
    own = run(Request(arms=("serial",), items=2, device="cpu"), Quiet())
    for task in skills.SKILLS:
        mine, theirs = own.arm("serial").tasks[task], asked.arm("serial").tasks[f"foldmoe_{task}"]
        assert [(s.scores, s.text, s.finish, s.tokens, s.past_end, s.group) for s in mine.samples] == [
            (s.scores, s.text, s.finish, s.tokens, s.past_end, s.group) for s in theirs.samples
        ]
        assert theirs.token_limit == mine.token_limit
        assert theirs.score("strict-match") == 1.0
    assert asked.harness.startswith("lm-eval ")
    label = "serial: foldmoe_needle, foldmoe_arithmetic"
    assert (steps.totals[label], steps.done[label]) == (4, 4)


def test_case_88_truncated_replies_are_counted_with_their_limit() -> None:
    ends = iter(["length", "stop", "length"])
    found = ask(lambda body: ("#### 7", next(ends)), tasks=("foldmoe_arithmetic",), items=3, concurrency=1)
    task = found.arms[0].tasks["foldmoe_arithmetic"]
    assert task.cut == pytest.approx(2 / 3)
    assert task.token_limit == 48
    assert found.harness.startswith("lm-eval 0.")
    assert found.arms[0].server["version"] == "9.9"


def test_case_89_strict_and_flexible_and_run_past_end() -> None:
    gold = next(item.answer for _, item in skills.grouped_items("arithmetic", 1))
    found = ask(lambda body: (f"#### {gold} <eof> 999", "stop"), tasks=("foldmoe_arithmetic",), items=1)
    task = found.arms[0].tasks["foldmoe_arithmetic"]
    assert task.samples[0].scores == {"strict-match": 1.0, "flexible-extract": 0.0}
    assert task.past_end == 1.0


def test_empty_and_missing_replies_are_empty_answers() -> None:
    for text in ("", None):
        task = ask(lambda body, t=text: (t, "stop"), tasks=OURS[:1], items=2, chat=True).arms[0].tasks[OURS[0]]
        assert task.empty == 1.0
        assert task.score("strict-match") == 0.0


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("concurrency", [1, 4])
def test_answers_keep_their_items_under_concurrency(chat: bool, concurrency: int) -> None:
    """Even items are cut and odd ones stop, whoever comes first."""
    numbered = {item.prompt: i for i, (_, item) in enumerate(skills.grouped_items("arithmetic", 8))}

    def reply(body: dict[str, Any]) -> tuple[str, str]:
        assert body.get("stop") != []  # Transformers' server fails at it
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        number = numbered[prompt if isinstance(prompt, str) else prompt[0]["text"]]
        return f"#### {number}", "stop" if number % 2 else "length"

    task = ask(reply, tasks=OURS[1:], items=8, chat=chat, concurrency=concurrency).arms[0].tasks[OURS[1]]
    assert [sample.text for sample in task.samples] == [f"#### {i}" for i in range(8)]
    assert [sample.finish for sample in task.samples] == ["length", "stop"] * 4
    assert {sample.tokens for sample in task.samples} == {7}


def test_a_preset_reaches_the_server(tmp_path: Path) -> None:
    """Few-shot examples as turns, thinking off, the token limit and the seed, as gsm8k's protocol says."""
    bodies: list[dict[str, Any]] = []

    def reply(body: dict[str, Any]) -> tuple[str, str]:
        bodies.append(body)
        return "So it is 4.\n#### 4", "stop"

    task = foreign_task(tmp_path)
    found = ask(reply, preset="gsm8k", tasks=(str(task),), concurrency=2)
    body = bodies[0]
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant"] * 5 + ["user"]
    assert (body["max_tokens"], body["seed"], body["temperature"]) == (1024, 123, 0.0)
    assert body["chat_template_kwargs"]["thinking"] is False
    read = found.arms[0].tasks["foreign"]
    assert (read.shots, read.token_limit) == (5, 1024)
    assert read.scores("strict-match") == [1.0, 0.0]


def test_thinking_that_a_server_leaves_in_is_taken_out(tmp_path: Path) -> None:
    task = str(foreign_task(tmp_path))
    for chat in (False, True):
        found = ask(
            lambda body: ("#### 9 perhaps</think>\n#### 4", "stop"), tasks=(task,), think_end="</think>", chat=chat
        )
        assert found.arms[0].tasks["foreign"].samples[0].text == "#### 4"


def test_tasks_that_compare_likelihoods_run_in_process(tmp_path: Path) -> None:
    data = tmp_path / "choice.json"
    data.write_text(json.dumps([{"q": "Text: The pass key is 12345. What is the pass key?\nAnswer:"}] * 2))
    config = f"""
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: ["12345", "99999"]
doc_to_target: 0
metric_list: [{{metric: acc}}]
"""
    (tmp_path / "choice.yaml").write_text(config)
    found = run(Request(arms=("native",), tasks=(str(tmp_path / "choice.yaml"),), device="cpu"), Quiet())
    task = found.arms[0].tasks["choice"]
    assert not task.generates
    assert task.metrics == ("acc",)
    assert task.scores("acc") == [1.0, 1.0]


def test_a_task_that_scores_only_its_whole_text_is_left_out_with_a_note(tmp_path: Path) -> None:
    data = tmp_path / "rolling.json"
    data.write_text(json.dumps([{"q": "The pass key is 12345."}] * 2))
    (tmp_path / "rolling.yaml").write_text(f"""
task: rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{q}}}}"
metric_list: [{{metric: word_perplexity}}]
""")
    asked = Request(arms=("serial", "native"), tasks=(str(tmp_path / "rolling.yaml"),), device="cpu")
    found = run(asked, Quiet())
    assert found.notes == ("rolling has no score of single items, so its arms cannot be paired; left out",)
    assert judge(found) == []


def test_a_server_that_refuses_is_an_error_with_the_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.models import api_models

    monkeypatch.setattr(api_models, "wait_exponential", lambda **_: lambda state: 0)

    def refuse(body: dict[str, Any]) -> tuple[str, str]:
        raise ValueError("no chat template")

    for concurrency in (1, 2):
        with pytest.raises(ValueError, match=r"arm native: the server at .* failed: .*400"):
            ask(refuse, tasks=OURS[:1], items=2, concurrency=concurrency)


def test_items_are_counted_by_length_and_lengths_are_tasks_of_their_own(tmp_path: Path) -> None:
    """Of a task that has several lengths and names its scores by them, as RULER's do."""
    rows = [{"q": f"{i}?", "max_length": length} for length in (512, 768) for i in range(4)]
    (tmp_path / "long.json").write_text(json.dumps(rows))
    (tmp_path / "scoring.py").write_text(
        "def by_length(doc, results):\n    return {'512': -1.0, str(doc['max_length']): 0.5}\n"
    )
    (tmp_path / "long.yaml").write_text(f"""
task: long
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "long.json"}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{q}}}}"
doc_to_target: ""
process_results: !function scoring.by_length
generation_kwargs: {{until: []}}
metric_list:
  - {{metric: "512", aggregation: mean, higher_is_better: true}}
  - {{metric: "768", aggregation: mean, higher_is_better: true}}
""")
    found = ask(lambda body: ("x", "stop"), tasks=(str(tmp_path / "long.yaml"),), items=3)
    tasks = found.arms[0].tasks
    assert [(name, len(task.samples)) for name, task in tasks.items()] == [("long @ 512", 3), ("long @ 768", 3)]
    assert all(task.scores("match") == [0.5] * 3 for task in tasks.values())
    assert found.arms[0].tasks["long @ 768"].token_limit == 256  # nobody said: lm-eval's own


@pytest.mark.slow  # reads all of lm-eval's tasks
def test_an_unknown_task_is_named() -> None:
    for name, hint in (("gpqa_diam", "it has gpqa_diamond_cot_n_shot, "), ("gsm9k", "`lm-eval ls tasks` lists")):
        with pytest.raises(ValueError, match=f"{name!r} is no task of lm-eval and no file; {hint}"):
            run(Request(arms=("serial",), tasks=(name,), device="cpu"), Quiet())


def test_data_that_cannot_be_had_is_an_error_that_names_the_task(tmp_path: Path) -> None:
    task = foreign_task(tmp_path)
    (tmp_path / "foreign.json").unlink()
    with pytest.raises(ValueError, match="its data cannot be had here: "):
        run(Request(arms=("serial",), tasks=(str(task),), device="cpu"), Quiet())


@pytest.mark.parametrize("task", skills.SKILLS)
def test_the_seed_chooses_the_items_through_lm_eval_as_it_does_without(task: str) -> None:
    asked: list[str] = []

    def reply(body: dict[str, Any]) -> tuple[str, str]:
        asked.append(body["prompt"])
        return "1", "stop"

    name = f"foldmoe_{task}"
    for named, options in ((name, {}), (name, {"seed": 7}), (str(TASKS / f"{name}.yaml"), {"seed": 7})):
        asked.clear()
        ask(reply, tasks=(named,), items=3, **options)
        expected = skills.grouped_items(task, 3, options.get("seed", 2026))
        assert sorted(asked) == sorted(item.prompt for _, item in expected)


def test_a_served_tiny_v4_scores_as_it_does_in_process() -> None:
    """The whole way over HTTP with a real model behind it; another with its shared expert zeroed shows."""
    from transformers import AutoTokenizer

    from foldmoe.evaluate.arms import ARMS
    from foldmoe.evaluate.generation import generate

    tokenizer, lock = AutoTokenizer.from_pretrained(skills.TINY_V4), threading.Lock()

    def behind(arm: str) -> Reply:
        import torch

        model = ARMS[arm].build(skills.TINY_V4, torch.device("cpu"))

        def reply(body: dict[str, Any]) -> tuple[str, str]:
            with lock:
                said = generate(model, tokenizer, [body["prompt"]], token_limit=body["max_tokens"])[0]
            return said.text, said.finish

        return reply

    with serve(behind("native")) as native, serve(behind("shared-zeroed")) as zeroed:
        served = {"native": native, "shared-zeroed": zeroed}
        request = Request(arms=("serial",), server=served, tasks=OURS[:1], items=2, device="cpu", concurrency=2)
        found = run(request, Quiet(), states={"native": "5 folded"})
    assert found.baseline == "serial"
    assert found.arm("native").resolved == "5 folded"
    same, different = judge(found)
    assert all((pair.same, pair.lost) == (2, 0) for pair in same.pairs.values())
    assert all(pair.lost == 2 for pair in different.pairs.values())


def foreign_task(folder: Path) -> Path:
    """A task of lm-eval's format that is not ours: gsm8k's filters, two questions, five examples."""
    rows = [{"question": f"{i} + {i}?", "answer": f"It is {2 * i}.\n#### {2 * i}"} for i in (2, 3)]
    shots = [{"question": f"{i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"} for i in range(6)]
    for name, content in (("foreign", rows), ("shots", shots)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    path = folder / "foreign.yaml"
    path.write_text(rf"""
task: foreign
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder / "foreign.json"}, train: {folder / "shots.json"}}}}}
test_split: test
training_split: train
fewshot_split: train
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question:"], do_sample: false}}
num_fewshot: 5
metric_list:
  - metric: exact_match
    regexes_to_ignore: ['(?s).*#### ']
filter_list:
  - name: strict-match
    filter: [{{function: regex, regex_pattern: '#### (\-?[0-9\.\,]+)'}}, {{function: take_first}}]
  - name: flexible-extract
    filter: [{{function: regex, group_select: -1, regex_pattern: '-?[0-9]+'}}, {{function: take_first}}]
""")
    return path
