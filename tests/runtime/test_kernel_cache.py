"""Compiled kernels on disk: a folder of our own, shared by many processes, whatever becomes of one of them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import foldmoe
from foldmoe import settings
from foldmoe.doctor import examine
from foldmoe.runtime import kernel_cache

knobs = pytest.importorskip(
    "triton.knobs", reason="NOT CHECKED: the kernel cache needs triton (pip install foldmoe[gpu])"
)

ROOT = Path(__file__).parents[2]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.compile_one", *words],
        env=environment | {"FOLDMOE_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder.with_name("others"))},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    state, bits = out.split()
    return state, bits


def test_case_73_two_processes_share_a_cache(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    pair = [start(folder) for _ in range(2)]
    first, second = (end(process) for process in pair)
    assert first[1] == second[1]
    assert end(start(folder)) == ("found", first[1])
    assert not list(folder.rglob("tmp.pid_*"))
    assert not (tmp_path / "others").exists(), "our kernels went to Triton's own folder"


def test_case_73_a_process_killed_while_it_writes_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    killed = start(folder, "kill")
    killed.communicate(timeout=120)
    assert killed.returncode == -9
    halves = [path for path in folder.rglob("*.cubin") if path.parent.name.startswith("tmp.pid_")]
    assert halves, "nothing was being written"
    assert [path for path in folder.rglob("*.cubin") if path not in halves] == []
    state, bits = end(start(folder))
    assert state == "compiled"
    assert end(start(folder)) == ("found", bits)


def test_triton_has_its_own_folder_back_afterwards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "others"))
    monkeypatch.setattr(kernel_cache, "_asked", lambda: tmp_path / "ours")
    with kernel_cache.used():
        assert knobs.cache.dir == str(tmp_path / "ours")
    assert knobs.cache.dir == str(tmp_path / "others")
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "others")


def test_threads_do_not_leave_each_others_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "others"))
    monkeypatch.setattr(kernel_cache, "_asked", lambda: tmp_path / "ours")
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with kernel_cache.used():
            inside.set()
            leave.wait(10)

    def pass_through() -> None:
        with kernel_cache.used():
            pass

    threads = [threading.Thread(target=hold), threading.Thread(target=pass_through)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    leave.set()
    for thread in threads:
        thread.join(10)
    assert knobs.cache.dir == str(tmp_path / "others")


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOLDMOE_CACHE_DIR", str(tmp_path / "file" / "kernels"))
    assert foldmoe.runtime.kernel_cache.directory() == settings.cache_dir() == tmp_path / "file" / "kernels"
    with (
        pytest.raises(OSError, match=r"FOLDMOE_CACHE_DIR is .*kernels, which cannot be made: Not a directory"),
        kernel_cache.used(),
    ):
        pass
    (line,) = [finding for finding in examine() if finding.subject == "kernel cache"]
    assert not line.ok
    assert "cannot be made" in line.advice


def test_doctor_shows_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FOLDMOE_CACHE_DIR", raising=False)
    (line,) = [finding for finding in examine() if finding.subject == "kernel cache"]
    assert (line.found, line.ok) == ("Triton's own", True)
    monkeypatch.setenv("FOLDMOE_CACHE_DIR", str(tmp_path / "k"))
    (line,) = [finding for finding in examine() if finding.subject == "kernel cache"]
    assert (line.found, line.ok) == (str(tmp_path / "k"), True)
