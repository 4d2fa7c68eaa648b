"""Kernels that a module of GPU tests needs, compiled by several processes before its first test."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any


def once_a_session(name: str, warm: Callable[[Any], None], todo: Sequence[Any]) -> None:
    """Run ``warm`` over ``todo`` in processes of their own; of pytest-xdist's workers one does, and the others wait."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    done = Path(tempfile.gettempdir()) / f"foldmoe-{name}-{session}"
    with done.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if done.exists() or not todo:
            return
        workers = min(len(todo), max(1, (os.cpu_count() or 2) - 2))
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            list(pool.map(warm, todo))
        done.touch()
