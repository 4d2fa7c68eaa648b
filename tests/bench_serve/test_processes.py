"""Children and the signals that reach them and us."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from foldmoe.bench.serve.processes import Child, terminated_as_interrupted

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@contextmanager
def having(number: signal.Signals, handler: signal.Handlers) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_child_can_be_asked_to_end_where_we_ignore_ctrl_c(tmp_path: Path) -> None:
    """As a background job of a shell does, and what it starts would."""
    with having(signal.SIGINT, signal.SIG_IGN):
        child = Child(["sleep", "60"], tmp_path / "log", os.environ)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    child.stop(20)
    assert child.status == -signal.SIGINT


def test_what_nohup_ignores_interrupts_nothing() -> None:
    with having(signal.SIGHUP, signal.SIG_IGN), terminated_as_interrupted():
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    with having(signal.SIGHUP, signal.SIG_DFL), terminated_as_interrupted(), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGHUP)
