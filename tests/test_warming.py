"""What several pytest workers warm together happens once."""

import threading
from pathlib import Path

import pytest

from tests.support.warming import once_a_session


def write(path: Path) -> None:
    with path.open("a") as out:
        out.write("warm ")


def test_workers_of_a_session_warm_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "1")
    todo = [tmp_path / "a", tmp_path / "b"]
    workers = [threading.Thread(target=once_a_session, args=("t", write, todo)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [path.read_text() for path in todo] == ["warm ", "warm "]
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", "2")
    once_a_session("t", write, todo)
    assert todo[0].read_text() == "warm warm "


def test_a_failure_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        once_a_session("t", write, [tmp_path / "nowhere" / "a"])
    (tmp_path / "nowhere").mkdir()
    once_a_session("t", write, [tmp_path / "nowhere" / "a"])
    assert (tmp_path / "nowhere" / "a").read_text() == "warm "
