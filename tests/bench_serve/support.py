"""A benchmark against the fake server and client, and results made by hand."""

from __future__ import annotations

import shlex
import socket
import sys
from pathlib import Path
from typing import Any

from foldmoe.bench.serve.results import Run, ServeResult
from foldmoe.bench.serve.runner import Event, Runner, prepare
from foldmoe.bench.serve.session import Options
from foldmoe.bench.serve.workloads import Workload, WorkloadSet

HERE = Path(__file__).parent
WORKLOAD = Workload(8, 4, 2, 6)
NAME = WORKLOAD.name
CLIENT = shlex.join([sys.executable, str(HERE / "fake_client.py")])


def server(*options: str) -> str:
    """The fake server's command line."""
    return shlex.join([sys.executable, str(HERE / "fake_server.py"), *options])


def faulty(*faults: str, once: Path | None = None) -> str:
    options = [word for fault in faults for word in ("--fault", fault)]
    return server(*options, *(["--once", str(once)] if once else []))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def asked(
    serve_cmd: str,
    arms: tuple[str, ...] = ("folded",),
    *,
    repeats: int = 1,
    client_cmd: str = CLIENT,
    again: str | None = None,
    workloads: tuple[Workload, ...] = (WORKLOAD,),
) -> ServeResult:
    chosen = WorkloadSet("test", "", workloads)
    twice = again and again + "-again"
    return ServeResult(serve_cmd, client_cmd, chosen, arms, repeats, {}, "again", twice, again)


def bench(
    result: ServeResult, folder: Path, *, resume: bool = False, **options: Any
) -> tuple[ServeResult, list[Event]]:
    """Run it; the result, and everything that was told."""
    told: list[Event] = []
    result = prepare(result, folder, resume=resume)
    Runner(result, folder, Options(**{"port": free_port(), "ready_timeout": 30.0} | options), told.append).run()
    return result, told


def run(arm: str, repeat: int, value: float, workload: str = NAME, **changes: Any) -> Run:
    """A run whose throughput is ``value`` tokens/s and whose latencies are its inverse."""
    metrics = {"output_throughput": value, "mean_tpot_ms": 1e3 / value}
    return Run(arm, repeat, workload, metrics, **{"seconds": 1e3 / value, "requested": 6, "completed": 6} | changes)
