"""``python -m foldmoe.warming.worker``: a pickled :class:`~foldmoe.warming.processes.Job` in, a line a kernel out."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import torch

from foldmoe.runtime import kernel_cache
from foldmoe.warming.processes import CACHED, COMPILED, Job
from foldmoe.warming.variants import walk


def work(job: Job) -> None:
    """Compile the job's variants."""
    from triton import knobs

    kernels: list[Any] = []
    knobs.compilation.listener = _say
    walk(job.plans, job.calls, job.device, job.mine, kernels.append)
    if torch.cuda.is_available():
        _launchers(kernels)


def _say(*, src: Any, cache_hit: bool, **_: Any) -> None:
    print(f"{CACHED if cache_hit else COMPILED}: {src.fn.__name__}", flush=True)


def _launchers(kernels: list[Any]) -> None:
    """The host side of each launch, which some versions of Triton compile from C; it needs the GPU's own driver."""
    from triton.runtime import driver

    with kernel_cache.used():
        for kernel in kernels:
            driver.active.launcher_cls(kernel.src, kernel.metadata)


if __name__ == "__main__":
    work(pickle.load(sys.stdin.buffer))
