"""Real processes that stay up for a whole test module and run jobs: a name of :mod:`tests.parallel.jobs` and arguments.

with Workers(4, folder) as workers:
    results = workers.run("forward", 2, fold="slot")   # on ranks 0 and 1, which form a group of their own
"""

from __future__ import annotations

import multiprocessing
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from pathlib import Path

PATIENCE = 100.0
"""Seconds that a job may take unless told otherwise."""


class JobError(Exception):
    """What a worker raised: the class's name, then the message."""


class Workers:
    """``size`` processes with a group over all of them, and one over ranks 0 and 1; with nccl, a GPU each."""

    def __init__(self, size: int, folder: Path, timeout: float = 60.0, backend: str = "gloo") -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(size)]
        self._pipes = [mine for mine, _ in pipes]
        self._processes = [
            context.Process(
                target=_work, args=(rank, size, str(folder / "store"), timeout, backend, theirs), daemon=True
            )
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()

    def run(self, job: str, ranks: int, *, patience: float = PATIENCE, **arguments: Any) -> list[Any]:
        """The job on the first ``ranks`` ranks; a result each, a :class:`JobError`, or None from a rank that died."""
        pipes = self._pipes[:ranks]
        for pipe in pipes:
            pipe.send((job, ranks, arguments))
        return [_answer(pipe, patience) for pipe in pipes]


def _answer(pipe: Connection, patience: float) -> Any:
    if not pipe.poll(patience):
        raise TimeoutError("a worker does not answer: hung")
    try:
        return pipe.recv()
    except EOFError:
        return None


def _work(rank: int, size: int, store: str, timeout: float, backend: str, pipe: Connection) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    from tests.parallel import jobs, support

    torch.set_num_threads(1)
    support.register_rows()
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    groups = {size: dist.group.WORLD, 2: dist.new_group([0, 1], timeout=timedelta(seconds=timeout))}
    while True:
        try:
            job, ranks, arguments = pipe.recv()
        except EOFError:  # the tests are done
            break
        try:
            result = getattr(jobs, job)(groups[ranks], **arguments)
        except Exception as error:
            result = JobError(f"{type(error).__name__}: {error}")
        pipe.send(result)
    os._exit(0)  # a group whose other ranks died cannot be taken down in good order
