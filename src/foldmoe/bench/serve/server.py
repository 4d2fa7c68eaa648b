"""One server: started, waited for, asked what it is, ended."""

from __future__ import annotations

import re
import shlex
import socket
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING

from foldmoe.bench.serve.processes import Child

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

HOST = "127.0.0.1"
_POLL = 0.2
_STOP_SECONDS = 60.0
_ANSWER_SECONDS = 10.0
_PORT_FREE_SECONDS = 30.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy has no business on this machine

_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|No available memory for the cache blocks", re.I)
_PORT_IN_USE = re.compile(r"address already in use", re.I)
_ERROR_LINE = re.compile(r"\b\w*(?:Error|Exception)\b.*:")
_PREFIX = re.compile(r"^(?:\(.*?\)\s*)?(?:[A-Z]+ [\d-]+ [\d:]+ \[.*?\]\s*)?")
_ELSEWHERE = "root cause above"  # vLLM's last line only says that something failed earlier


class ServerError(Exception):
    """A server that did not start, or ended on its own; the message says why and where its log is."""


def command_line(serve_cmd: str, port: int) -> list[str]:
    """The server's arguments: ``{port}`` is filled in; without it ``--port`` is added.

    Raises:
        ValueError: an empty command line, or one that sets another port itself.
    """
    parts = shlex.split(serve_cmd)
    if not parts:
        raise ValueError("the server's command line is empty")
    if any("{port}" in part for part in parts):
        return [part.replace("{port}", str(port)) for part in parts]
    for index, part in enumerate(parts):
        name, _, value = part.partition("=")
        if name == "--port":
            found = value or "".join(parts[index + 1 : index + 2])
            if found != str(port):
                raise ValueError(f"the server's command line says --port {found}, the benchmark uses {port}: drop one")
            return parts
    return [*parts, "--port", str(port)]


class RunningServer:
    """A server in its own process group.

    Args:
        command: its arguments, from :func:`command_line`.
        port: that it will listen on, on this machine.
        environment: the whole environment.
        log: file for its output.

    Raises:
        OSError: another process listens on the port, or the program is not there.
    """

    def __init__(self, command: list[str], port: int, environment: Mapping[str, str], log: Path) -> None:
        self.port = port
        self.url = f"http://{HOST}:{port}"
        _wait_for_port(port)
        self.child = Child(command, log, environment)

    def wait_until_healthy(self, timeout: float) -> float:
        """Seconds from now until ``GET /health`` is answered with 200.

        Raises:
            ServerError: the server ended, or did not answer within ``timeout`` seconds.
        """
        start = time.monotonic()
        while (waited := time.monotonic() - start) < timeout:
            self.check_alive()
            if self.get("/health") is not None:
                return waited
            time.sleep(_POLL)
        raise ServerError(f"not healthy after {timeout:.0f} s{self._last_words()}")

    def check_alive(self) -> None:
        """Nothing, if the server runs.

        Raises:
            ServerError: it ended; the reason is looked for in its log.
        """
        status = self.child.status
        if status is not None:
            raise ServerError(f"{self._ended(status)}{self._last_words()}")

    def get(self, path: str) -> str | None:
        """Body of an answer with status 200; None for anything else, silence included."""
        try:
            with _DIRECT.open(self.url + path, timeout=_ANSWER_SECONDS) as answer:
                body: str = answer.read().decode(errors="replace")
                return body if answer.status == 200 else None
        except (OSError, ValueError):
            return None

    def stop(self) -> None:
        """End it and everything that it started."""
        self.child.stop(_STOP_SECONDS)

    def _ended(self, status: int) -> str:
        tail = self.child.tail(400)
        if _OUT_OF_MEMORY.search(tail):
            return "the server ran out of memory: fewer layers, a shorter --max-model-len or a smaller batch may fit"
        if _PORT_IN_USE.search(tail):
            return f"the server found port {self.port} in use: choose another with --port"
        if status == -9:
            return "the server was killed (signal 9), as the system does where memory runs out"
        return f"the server died of signal {-status}" if status < 0 else f"the server ended with status {status}"

    def _last_words(self) -> str:
        """The last line of the log that names an error, and where the log is."""
        lines = self.child.tail(400).splitlines()
        errors = [line for line in lines if _ERROR_LINE.search(line) and _ELSEWHERE not in line] or lines
        last = _PREFIX.sub("", errors[-1]).strip() if errors else ""
        return (f"; it said: {last}" if last else "; it said nothing") + f" (all of it: {self.child.log})"


def _wait_for_port(port: int) -> None:
    """A server of ours that has just ended may hold its port for a moment."""
    end = time.monotonic() + _PORT_FREE_SECONDS
    while not _port_is_free(port):
        if _listens(port) or time.monotonic() > end:
            raise OSError(
                f"port {port} is in use by another process: end it, or choose another port with --port; nothing was "
                "sent to it"
            )
        time.sleep(_POLL)


def _port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0
