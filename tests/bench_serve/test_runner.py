"""Whole benchmarks against a fake server and client: order, readiness, proof of the arm, and every way to fail."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from foldmoe.bench.serve import runner
from foldmoe.bench.serve.arms import ARMS
from foldmoe.bench.serve.client import checked
from foldmoe.bench.serve.results import ServeResult
from foldmoe.bench.serve.workloads import Workload
from foldmoe.report.serve_table import remarks
from tests.bench_serve.support import CLIENT, NAME, WORKLOAD, asked, bench, faulty, server


def alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_arms_are_interleaved_each_on_a_fresh_server_and_the_switch_is_all_that_differs(tmp_path: Path) -> None:
    arms = ("stock-serial", "stock-dual-stream", "serial", "dual-stream", "folded")
    result, _ = bench(asked(server(), arms, repeats=2, again="serial"), tmp_path)
    order = [*arms, "serial-again"]
    assert [run.arm for run in result.runs] == [*order, *reversed(order)]
    assert [run.repeat for run in result.runs] == [1] * 6 + [2] * 6
    assert {s.arm: s.runs_as for s in result.servers} == {
        "stock-serial": "stock",
        "stock-dual-stream": "stock",
        "serial": "serial",
        "dual-stream": "dual-stream",
        "folded": "folded",
        "serial-again": "serial",
    }
    assert {frozenset(s.environment) for s in result.servers} == {
        frozenset(("FOLDMOE_FOLD", "VLLM_DISABLE_SHARED_EXPERTS_STREAM"))
    }
    assert result.complete
    assert not result.failures


def test_what_is_kept_of_a_run_and_of_its_server(tmp_path: Path) -> None:
    result, _ = bench(asked(server()), tmp_path)
    (run,), (record,) = result.runs, result.servers
    assert (run.workload, run.requested, run.completed, run.short, run.invalid) == (NAME, 6, 6, 0, ())
    assert {"output_throughput", "mean_tpot_ms", "median_itl_ms", "p99_ttft_ms"} <= set(run.metrics)
    assert len(run.latencies) == len(set(run.texts)) == 6
    assert run.longest_gap is not None
    assert 0 < run.longest_gap < max(run.latencies)
    assert run.prefix_hits == 0.0
    assert record.versions == {"foldmoe": "0", "vllm": "0.32.0+fake", "torch": "2"}
    assert (record.model_load_bytes, record.workspace_bytes, record.kv_blocks) == (3 * 2**20, 2**20, 77)
    assert "fake server, fold native" in (tmp_path / record.log).read_text()
    assert ServeResult.load(tmp_path / runner.RESULT) == result


def test_the_warm_pass_runs_every_workload_first_over_other_prompts(tmp_path: Path) -> None:
    two = (WORKLOAD, Workload(8, 5, 1, 2))
    result, told = bench(asked(server(), workloads=two), tmp_path)
    texts = {path.name: json.loads(path.read_text())["generated_texts"] for path in (tmp_path / "raw").glob("*.json")}
    seeds = {name: {text.split()[0] for text in found} for name, found in texts.items()}
    assert seeds == {
        "folded-1-8-4-x2-warm.json": {"43"},
        "folded-1-8-4-x2.json": {"42"},
        "folded-1-8-5-x1-warm.json": {"43"},
        "folded-1-8-5-x1.json": {"42"},
    }
    said = [event.text.partition("repeat 1: ")[2] for event in told if event.text]
    assert said == ["starting a server", "8/4 x2, warming up", "8/5 x1, warming up", "8/4 x2", "8/5 x1"]
    assert [run.workload for run in result.runs] == ["8/4 x2", "8/5 x1"]


def test_warming_with_the_largest_workload_alone_takes_one_run_less(tmp_path: Path) -> None:
    two = (WORKLOAD, Workload(8, 5, 1, 2))
    result, told = bench(replace(asked(server(), workloads=two), warm="largest"), tmp_path)
    said = [event.text.partition("repeat 1: ")[2] for event in told if event.text]
    assert said == ["starting a server", "8/4 x2, warming up", "8/4 x2", "8/5 x1"]
    assert told[-1].done == 4
    assert result.complete
    assert any("every server ran the largest workload alone once" in line for line in remarks(result))


def test_progress_counts_every_step_and_knows_the_time_left_after_one_server(tmp_path: Path) -> None:
    _, told = bench(asked(server(), repeats=2), tmp_path)
    assert told[0].seconds_left is None
    assert (told[-1].done, told[-1].seconds_left) == (6, 0.0)
    second = next(event for event in told if "repeat 2" in event.text)
    assert second.done == 3
    assert second.seconds_left is not None
    assert second.seconds_left > 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("broken", "ended with status 1; it said: ValueError: unknown quantization method mxfp9"),
        ("out-of-memory", "the server ran out of memory: .* may fit; it said: torch.OutOfMemoryError"),
        ("killed", r"killed \(signal 9\), as the system does where memory runs out"),
        ("never-healthy", "not healthy after 4 s"),
    ],
)
def test_an_arm_that_does_not_start_is_named_with_the_reason_and_the_others_go_on(
    tmp_path: Path, fault: str, message: str
) -> None:
    result, _ = bench(
        asked(faulty(f"{fault}:dual"), ("dual-stream", "folded"), repeats=2),
        tmp_path,
        ready_timeout=4.0 if fault == "never-healthy" else 30.0,
    )
    (failure,) = result.failures  # once: the second round does not try it again
    assert (failure.arm, failure.repeat, failure.where) == ("dual-stream", 1, "start")
    assert re.search(message, failure.reason), failure.reason
    assert str(tmp_path / "logs" / "dual-stream-1.log") in failure.reason
    assert [(run.arm, run.repeat) for run in result.runs] == [("folded", 1), ("folded", 2)]
    assert not result.complete


def test_a_crash_keeps_the_other_runs_and_resume_repeats_the_lost_one_alone(tmp_path: Path) -> None:
    once = tmp_path / "crashed"
    command, out = faulty("crash:dual", once=once), tmp_path / "out"
    result, _ = bench(asked(command, ("dual-stream", "folded")), out)
    (failure,) = result.failures
    assert (failure.arm, failure.where) == ("dual-stream", NAME)
    assert "RuntimeError: an illegal memory access" in failure.reason
    assert [run.arm for run in result.runs] == ["folded"]
    before = (out / "raw" / "folded-1-8-4-x2.json").stat().st_mtime_ns
    again, told = bench(asked(command, ("dual-stream", "folded")), out, resume=True)
    assert again.complete
    assert not again.failures
    assert {run.arm for run in again.runs} == {"folded", "dual-stream"}
    assert (out / "raw" / "folded-1-8-4-x2.json").stat().st_mtime_ns == before
    assert not any("folded" in event.text for event in told)


def test_resume_refuses_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    bench(asked(server()), tmp_path)
    with pytest.raises(ValueError, match=r"serve\.json exists: --resume continues it"):
        bench(asked(server()), tmp_path)
    with pytest.raises(ValueError, match=r"cannot resume .*: serve_cmd was .*fake_server\.py', and now is"):
        bench(asked(server("--milliseconds", "native=2")), tmp_path, resume=True)
    more, _ = bench(asked(server(), ("serial", "folded"), repeats=2), tmp_path, resume=True)
    assert len(more.runs) == 4
    assert more.complete
    fewer, _ = bench(asked(server()), tmp_path, resume=True)
    assert len(fewer.runs) == 4  # what was measured stays
    left_out = next(run for run in fewer.runs if not fewer.asks_for(run))
    fewer.runs.append(replace(left_out, invalid=("short answers",)))
    assert not any("short answers" in line for line in remarks(fewer))


def test_a_command_with_which_nothing_was_measured_can_be_corrected(tmp_path: Path) -> None:
    for resume in (False, True):
        out = tmp_path / str(resume)
        with pytest.raises(FileNotFoundError):
            bench(asked("no-such-server serve"), out)
        found, _ = bench(asked(server()), out, resume=resume)
        assert found.complete
        assert ServeResult.load(out / runner.RESULT).serve_cmd == server()


def test_an_invalid_run_of_an_arm_no_longer_asked_for_does_not_stay_in_the_way(tmp_path: Path) -> None:
    command = faulty("failing:dual")
    both, _ = bench(asked(command, ("dual-stream", "folded")), tmp_path)
    assert not both.complete
    one, _ = bench(asked(command), tmp_path, resume=True)
    assert one.complete
    again, _ = bench(asked(command, ("dual-stream", "folded")), tmp_path, resume=True)
    assert not again.complete


def test_a_port_in_use_stops_everything_before_anything_is_sent_there(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} is in use by another process"):
            bench(asked(server()), tmp_path, port=port)
    assert ServeResult.load(tmp_path / runner.RESULT).runs == []


def test_a_server_that_ignores_signals_and_its_children_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foldmoe.bench.serve.server._STOP_SECONDS", 0.4)
    bench(asked(faulty("stubborn", "children")), tmp_path)
    child = int(re.search(r"child (\d+)", (tmp_path / "logs" / "folded-1.log").read_text())[1])  # type: ignore[index]
    assert not alive(child)


@pytest.mark.parametrize(
    ("client", "options", "message"),
    [
        (f"{CLIENT} --fail", {}, "the client ended with status 1: ValueError: no tokenizer here"),
        (f"{CLIENT} --sleep", {"run_timeout": 1.0}, "the client still ran after 1 s: the server may hang"),
        (f"{CLIENT} --no-file", {}, "the client wrote no result"),
        (f"{CLIENT} --no-such-option", {}, "the client ended with status 2: .*unrecognized arguments"),
    ],
)
def test_a_client_that_fails_or_hangs_is_a_failure_with_its_last_words(
    tmp_path: Path, client: str, options: dict[str, float], message: str
) -> None:
    result, _ = bench(asked(server(), client_cmd=client), tmp_path, **options)
    (failure,) = result.failures
    assert failure.where == NAME
    assert re.search(message, failure.reason), failure.reason


def test_a_program_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="cannot start 'no-such-server': no such program"):
        bench(asked("no-such-server serve"), tmp_path)
    with pytest.raises(FileNotFoundError, match="to set variables, begin with env"):
        bench(asked("X=1 vllm serve"), tmp_path / "other")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("failing", "1 of 6 requests failed, the first with: HTTP Error 500"),
        ("short", r"4 of 6 answers \(66\.7%\) do not have the 4 tokens asked for; the shortest has 3"),
    ],
)
def test_failed_or_short_requests_make_the_run_invalid(tmp_path: Path, fault: str, message: str) -> None:
    result, told = bench(asked(faulty(f"{fault}:native"), ("serial", "folded")), tmp_path)
    valid, invalid = result.runs
    assert valid.invalid == ()
    assert re.search(message, invalid.invalid[0]), invalid.invalid
    assert not result.complete
    assert any(event.wrong and "does not count" in event.text for event in told)


def test_a_bad_request_is_taken_for_a_prompt_that_does_not_fit() -> None:
    found = {
        "output_lens": [4, 0], "ttfts": [0.1, 0.0], "itls": [[], []], "generated_texts": ["a", ""],
        "errors": ["", "Bad Request"], "completed": 1,
    }  # fmt: skip
    run = checked(found, Workload(8, 4, 1, 2), arm="folded", repeat=1, seconds=1.0)
    assert "failed, the first with: Bad Request; vLLM refuses prompts of more tokens than" in run.invalid[0]


def test_variables_of_the_benchmark_itself_do_not_reach_another_arm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDMOE_FOLD", "stock")
    monkeypatch.setenv("VLLM_DISABLE_SHARED_EXPERTS_STREAM", "1")
    result, _ = bench(asked(server(), ("stock-dual-stream", "folded")), tmp_path)
    assert [s.runs_as for s in result.servers] == ["stock", "folded"]
    assert os.environ["FOLDMOE_FOLD"] == "stock"
    assert ARMS["stock-serial"].environment["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] == "1"


def test_a_server_takes_no_longer_to_stop_than_it_needs(tmp_path: Path) -> None:
    start = time.monotonic()
    bench(asked(server()), tmp_path)
    assert time.monotonic() - start < 20
