"""Child processes that are ended with everything they started, whatever ends us."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from types import FrameType

_POLL = 0.05
_TAIL_BYTES = 1 << 16


class Child:
    """A command in a process group of its own, so that Ctrl-C reaches only us and :meth:`stop` reaches all of it.

    Args:
        command: program and arguments.
        log: file that output and errors go to; one that exists is overwritten.
        environment: the whole environment.

    Raises:
        OSError: the program is not there or cannot be run.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self.command = list(command)
        self.log = log
        try:
            with log.open("wb") as output, _interruptible():
                self._process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=dict(environment),
                    start_new_session=True,
                )
        except FileNotFoundError as error:
            hint = "; to set variables, begin with env" if "=" in self.command[0] else ""
            raise FileNotFoundError(f"cannot start {self.command[0]!r}: no such program{hint}") from error

    @property
    def status(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Exit status; None if it still runs after ``seconds``."""
        try:
            return self._process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return None

    def stop(self, grace: float) -> None:
        """End the whole group: ask, wait up to ``grace`` seconds, then kill. A second Ctrl-C kills at once."""
        try:
            if self.status is None:
                self._signal(signal.SIGINT)  # vLLM's orderly end
                if self.wait(grace / 2) is None:
                    self._signal(signal.SIGTERM)
                    self.wait(grace / 2)
        finally:
            self._signal(signal.SIGKILL)  # also what the command itself left behind
            self._process.wait()
            end = time.monotonic() + grace
            while self._group_lives() and time.monotonic() < end:  # until memory and ports are free again
                time.sleep(_POLL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # nothing of the group is left
            os.killpg(self._process.pid, number)

    def _group_lives(self) -> bool:
        """Whether any process of the group still runs; zombies, which nobody may ever reap, hold nothing."""
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                state, _, group = stat.read_text().rpartition(")")[2].split()[:3]
                if int(group) == self._process.pid and state not in "ZX":
                    return True
        return False

    def tail(self, lines: int = 15) -> str:
        """The last lines of the log."""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


@contextmanager
def _interruptible() -> Iterator[None]:
    """Children start with SIGINT as it usually is: they would inherit that we ignore it, as shells make background jobs
    do, and could not be asked to end.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if not ignored or threading.current_thread() is not threading.main_thread():  # others may not set handlers
        yield
        return
    signal.signal(signal.SIGINT, lambda number, frame: None)  # a handler, unlike SIG_IGN, ends with our program
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM and SIGHUP raise :class:`KeyboardInterrupt`, as Ctrl-C does: children are ended, results kept.

    What is ignored stays so: ``nohup`` is there to outlive a terminal.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
