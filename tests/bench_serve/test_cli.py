"""``foldmoe bench serve`` as a user runs it: exit statuses, Ctrl-C, the command that repeats it."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from foldmoe.bench.serve.results import ServeResult
from foldmoe.cli.main import app
from tests.bench_serve.support import CLIENT, faulty, free_port, server
from tests.bench_serve.test_runner import alive

if TYPE_CHECKING:
    from pathlib import Path

FOLDMOE = [sys.executable, "-c", "from foldmoe.cli.main import app; app()"]
ONE = {"input_len": 8, "output_len": 4, "concurrency": 2, "num_prompts": 6}


@pytest.fixture
def workloads(tmp_path: Path) -> str:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"workloads": [ONE]}))
    return str(path)


def words(serve_cmd: str, out: Path, workloads: str, *more: str) -> list[str]:
    fixed = ["--serve-cmd", serve_cmd, "--client-cmd", CLIENT, "--workloads", workloads, "--out", str(out)]
    return ["bench", "serve", *fixed, "--port", str(free_port()), *more]


def test_a_whole_benchmark_prints_tables_and_the_command_that_repeats_it(tmp_path: Path, workloads: str) -> None:
    out = tmp_path / "out"
    typed = words(server(), out, workloads, "--arms", "serial,folded", "--repeats", "1")
    done = CliRunner().invoke(app, typed, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    for part in ("ours serial -> ours folded", "ours serial, again", "runs as", "6/6"):
        assert part in done.output
    again = shlex.split(ServeResult.load(out / "serve.json").command)
    assert again[:3] == ["foldmoe", "bench", "serve"]
    options = dict(zip(again[3::2], again[4::2], strict=True))
    assert options == dict(zip(typed[2::2], typed[3::2], strict=True))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--arms", "folded,floded"], "no arm floded"),
        (["--arms", "folded", "--noise", "serial"], "--noise names an arm of --arms, or none; found 'serial'"),
        (["--workloads", "nowhere.json"], "no workloads 'nowhere.json'"),
        (["--port", "70000"], "Invalid value for '--port'"),
        (["--port", "0"], "Invalid value for '--port'"),
    ],
)
def test_what_cannot_be_run_is_said_before_any_server_starts(
    tmp_path: Path, workloads: str, more: list[str], message: str
) -> None:
    done = CliRunner().invoke(app, words(server(), tmp_path / "out", workloads, *more), env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "out").exists()


def test_missing_runs_end_in_status_1_and_a_missing_program_in_2(tmp_path: Path, workloads: str) -> None:
    arms = ["--arms", "folded", "--noise", "none"]
    wide = {"COLUMNS": "300"}
    done = CliRunner().invoke(app, words(faulty("broken"), tmp_path / "a", workloads, *arms), env=wide)
    assert done.exit_code == 1
    assert "failed: ours folded, repeat 1, start: the server ended with status 1" in done.output
    done = CliRunner().invoke(app, words("no-such-server", tmp_path / "b", workloads, *arms), env=wide)
    assert done.exit_code == 2
    assert "cannot start 'no-such-server': no such program" in done.output
    assert "keeps what was measured" not in done.output


def test_what_was_measured_before_a_failure_is_said_to_be_kept(tmp_path: Path, workloads: str) -> None:
    out = tmp_path / "out"
    typed = words(faulty("broken:dual"), out, workloads, "--arms", "folded,dual-stream", "--noise", "none")
    done = CliRunner().invoke(app, [*typed, "--repeats", "1"], env={"COLUMNS": "300"})
    assert done.exit_code == 1
    assert f"{out / 'serve.json'} keeps what was measured, --resume continues" in done.output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_its_children_and_keeps_what_it_has(
    tmp_path: Path, workloads: str, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    # The dual-stream server starts a child of its own and then answers nothing.
    command = faulty("hang:dual", "children")
    typed = words(command, out, workloads, "--arms", "folded,dual-stream", "--noise", "none", "--repeats", "1")
    with (tmp_path / "printed").open("w") as printed:
        process = subprocess.Popen([*FOLDMOE, *typed], stdout=printed, stderr=subprocess.STDOUT)
    log, end = out / "logs" / "dual-stream-1.log", time.monotonic() + 90
    while not (log.exists() and "child" in log.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(0.5)  # into the warm pass
    process.send_signal(number)
    assert process.wait(60) == 130
    text = (tmp_path / "printed").read_text()
    assert "interrupted; servers were ended" in text
    child = int(re.search(r"child (\d+)", log.read_text())[1])  # type: ignore[index]
    assert not alive(child)
    kept = ServeResult.load(out / "serve.json")
    assert [run.arm for run in kept.runs] == ["folded"]
    assert not kept.complete
