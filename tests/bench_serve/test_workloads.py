"""Workloads: the published ones as presets, files of one's own, and what is refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from foldmoe.bench.serve import workloads
from foldmoe.bench.serve.client import Client

if TYPE_CHECKING:
    from pathlib import Path


def test_the_native_folds_five_workloads() -> None:
    found = workloads.load("native-fold")
    assert [(w.input_len, w.output_len, w.concurrency, w.num_prompts) for w in found.workloads] == [
        (128, 256, 1, 8),
        (1024, 128, 1, 8),
        (1024, 128, 64, 128),
        (8192, 32, 16, 32),
        (8192, 1024, 16, 100),
    ]
    assert found.seed == 42


def test_steps_guess_what_a_workload_costs() -> None:
    """Seconds of the folded arm on an H200 (docs/serving.md): output tokens over output tokens a second."""
    served = {(128, 256, 1, 6): 150, (1024, 128, 1, 6): 137, (1024, 128, 64, 128): 986, (8192, 32, 16, 32): 58.9}
    served[8192, 1024, 16, 16] = 696
    rates = [n * out / rate / workloads.Workload(tokens, out, at_once, n).steps
             for (tokens, out, at_once, n), rate in served.items()]  # fmt: skip
    assert max(rates) < 4 * min(rates)


def test_the_slot_folds_sweep_has_at_least_sixteen_prompts_and_four_for_every_one_in_flight() -> None:
    found = workloads.load("slot-fold").workloads
    assert len(found) == 16
    assert {(w.input_len, w.output_len) for w in found} == {(1024, 1024), (8192, 1024)}
    assert {w.concurrency: w.num_prompts for w in found} == {
        1: 16, 2: 16, 4: 16, 8: 32, 16: 64, 32: 128, 64: 256, 128: 512,
    }  # fmt: skip


@pytest.mark.parametrize("name", workloads.presets())
def test_every_preset_loads(name: str) -> None:
    assert workloads.load(name).what


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    one = {"input_len": 3, "output_len": 4, "concurrency": 5, "num_prompts": 6}
    path.write_text(json.dumps({"seed": 7, "workloads": [one]}))
    found = workloads.load(str(path))
    assert (found.name, found.seed, found.workloads) == ("mine", 7, (workloads.Workload(3, 4, 5, 6),))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "Expecting property name"),
        ("[]", "expected an object with workloads or a sweep, found a list"),
        ("{}", "expected either workloads or a sweep, found neither"),
        ('{"workloads": []}', "expected workloads that differ"),
        ('{"workloads": [], "sed": 1}', "the file has unknown fields sed"),
        ('{"workloads": [{"input_len": 1}]}', "lacks concurrency, num_prompts, output_len"),
        (
            '{"workloads": [{"input_len": 1, "output_len": 0, "concurrency": 1, "num_prompts": 1}]}',
            "expected positive integers, found {'output_len': 0}",
        ),
        ('{"sweep": {"lengths": [[1, 1]]}}', "a sweep lacks concurrency, prompts_at_least"),
    ],
)
def test_a_file_that_says_something_else_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        workloads.load(str(path))
    assert str(path) in str(caught.value)


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="neither a file nor one of cpu, native-fold, short, slot-fold"):
        workloads.load("native")


def test_the_client_is_called_with_the_published_flags(tmp_path: Path) -> None:
    client = Client("vllm bench serve --tokenizer here", {}, 1.0)
    words = client.arguments(workloads.Workload(1024, 128, 64, 128), seed=42, port=81, out=tmp_path / "r.json")
    line = " ".join(words)
    assert line.startswith("vllm bench serve --tokenizer here ")
    for flags in (
        "--dataset-name random --random-range-ratio 0 --random-prefix-len 0 --request-rate inf --ignore-eos",
        "--temperature 0",
        "--seed 42",
        "--num-warmups 2",
        "--percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,95,99",
        "--random-input-len 1024 --random-output-len 128",
        "--max-concurrency 64 --num-prompts 128",
        "--save-result --save-detailed",
    ):
        assert flags in line
