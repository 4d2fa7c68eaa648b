"""Variants compiled in processes of their own: Triton's compiler holds the interpreter's lock most of the time."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from time import monotonic
from typing import IO, TYPE_CHECKING

from foldmoe.backends import get
from foldmoe.runtime import kernel_cache
from foldmoe.warming.variants import walk

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from foldmoe.planner import LayerPlan
    from foldmoe.planner.devices import Device
    from foldmoe.warming.variants import Calls

CACHED, COMPILED = "in cache", "compiled"
"""First words of the lines that a worker prints; the kernel's name follows."""


@dataclass
class Report:
    """What was compiled.

    Args:
        device: what for.
        compiled, cached: names of the variants' kernels, compiled now or found in the cache.
        seconds: wall-clock time of it all.
        folder: where they are kept.
    """

    device: str
    compiled: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    seconds: float = 0.0
    folder: str = ""

    def note(self, line: str) -> None:
        """A worker's line."""
        state, _, name = line.partition(": ")
        (self.cached if state == CACHED else self.compiled).append(name)


@dataclass(frozen=True)
class Job:
    """One worker's share: every ``workers``-th variant of each kernel, from ``worker`` on."""

    plans: tuple[LayerPlan, ...]
    calls: Calls
    device: Device
    worker: int
    workers: int

    def mine(self, name: str, before: int) -> bool:
        return before % self.workers == self.worker


def compile_ahead(
    plans: Sequence[LayerPlan],
    calls: Calls,
    device: Device,
    *,
    processes: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Compile all that ``plans`` launch for ``calls`` on ``device``, which need not be here, into Triton's cache.

    Args:
        plans: the layers of one rank.
        processes: at most so many at once; one a CPU if None.
        progress: called with variants done, variants in all, and a line about the last one.

    Raises:
        ValueError: kernels cannot be compiled for ``device``; a layer whose top-k nothing tells.
        OSError: a cache folder that cannot be written.
        RuntimeError: a variant that does not compile.
    """
    start = monotonic()
    _check(plans, device)
    names = walk(plans, calls, device, lambda name, before: False, lambda kernel: None)
    report = Report(device.name, folder=_folder() if names else "")
    workers = max(1, min(processes or os.cpu_count() or 1, max((names.count(name) for name in names), default=0)))
    jobs = [Job(tuple(plans), calls, device, worker, workers) for worker in range(workers)] if names else []
    for line in _lines(jobs):
        report.note(line)
        if progress:
            progress(len(report.cached) + len(report.compiled), len(names), line)
    report.seconds = monotonic() - start
    return report


def compile_beside(
    plans: Sequence[LayerPlan],
    calls: Calls,
    device: Device,
    *,
    processes: int,
    done: Callable[[Report | Exception], None],
) -> Thread:
    """:func:`compile_ahead` without waiting for it, in processes that see no GPU: they take no memory of a server's.

    A kernel that is needed before its turn is compiled where it is needed, as without this.

    Args:
        processes: as many at once.
        done: called at the end, in a thread of its own, with the report or with what went wrong.
    """
    jobs = [Job(tuple(plans), calls, device, worker, processes) for worker in range(processes)] if plans else []

    def listen() -> None:
        try:
            start, report = monotonic(), Report(device.name, folder=_folder())
            for line in _lines(jobs, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES=""):
                report.note(line)
            report.seconds = monotonic() - start
            done(report)
        except Exception as error:
            done(error)

    thread = Thread(target=listen, name="foldmoe-compile", daemon=True)
    thread.start()
    return thread


def _check(plans: Sequence[LayerPlan], device: Device) -> None:
    for name in {plan.backend for plan in plans if plan.arm != "stock"}:
        if (why := get(name).unavailable(device)) is not None:
            raise ValueError(f"{name} on {device.name}: {why}")


def _folder() -> str:
    from triton import knobs

    return str(kernel_cache.directory() or knobs.cache.dir)


def _lines(jobs: Sequence[Job], **environment: str) -> Iterator[str]:
    """What the workers print, as it comes; they get ``environment`` besides this process's own.

    Raises:
        RuntimeError: of the first worker that fails; the others are ended.
    """
    said: SimpleQueue[str | None] = SimpleQueue()
    with tempfile.TemporaryFile() as errors:
        workers: list[subprocess.Popen[bytes]] = []
        try:
            for job in jobs:
                workers.append(_spawn(errors, environment))
                Thread(target=_serve, args=(workers[-1], pickle.dumps(job), said), daemon=True).start()
            for _ in workers:
                yield from iter(said.get, None)
                if any(worker.poll() for worker in workers):
                    # Not by seeking: workers that still write share the position.
                    text = os.pread(errors.fileno(), os.fstat(errors.fileno()).st_size, 0).decode(errors="replace")
                    raise RuntimeError(f"foldmoe: a kernel did not compile:\n{text[-4000:]}")
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _spawn(errors: IO[bytes], more: dict[str, str]) -> subprocess.Popen[bytes]:
    """A fresh interpreter, which needs nothing of the caller's main module, and finds what the caller imports."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)} | more
    command = [sys.executable, "-m", "foldmoe.warming.worker"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment)


def _serve(worker: subprocess.Popen[bytes], job: bytes, said: SimpleQueue[str | None]) -> None:
    """Hand a worker its job and pass on what it prints; None when it has ended."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        with suppress(BrokenPipeError), worker.stdin as pipe:  # it has died: its exit status and last words tell why
            pipe.write(job)
        for line in worker.stdout:
            said.put(line.decode().rstrip())
    finally:
        worker.wait()
        said.put(None)
