"""Where Triton keeps what it compiles for us.

Without ``FOLDMOE_CACHE_DIR`` that is Triton's own folder (``TRITON_CACHE_DIR``, or ``~/.triton/cache``). With it, the
backends' kernels are looked up and stored there, and nobody else's: Triton's setting is changed only around the first
launch of a variant, under a lock.

Many processes may share the folder. Nobody waits for anybody: Triton writes each file beside its place and renames it,
so a reader finds a whole file or none, and two that compile the same kernel store the same. A process that dies
half-way leaves a ``tmp.pid_*`` folder that nobody reads.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_lock = RLock()
_asked: Callable[[], Path | None] | None = None


def follow(asked: Callable[[], Path | None]) -> None:
    """Ask ``asked`` for the folder at every first launch; None leaves Triton's own."""
    global _asked
    _asked = asked


def directory() -> Path | None:
    """The folder that was asked for, or None."""
    return _asked() if _asked else None


def problem() -> str | None:
    """Why the folder that was asked for cannot be used, or None."""
    folder = directory()
    if folder is None:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"FOLDMOE_CACHE_DIR is {folder}, which cannot be made: {error.strerror}"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        return f"FOLDMOE_CACHE_DIR is {folder}, which this user cannot read and write"
    return None


@contextmanager
def used() -> Iterator[None]:
    """Triton compiles into our folder while this is open.

    Raises:
        OSError: the folder cannot be made or written.
    """
    folder = directory()
    if folder is None:
        yield
        return
    if (why := problem()) is not None:
        raise OSError(f"foldmoe: {why}; point it at a folder that can be written, or unset it to use Triton's own")
    from triton import knobs

    with _lock, knobs.cache.scope():  # the scope also restores TRITON_CACHE_DIR, which children inherit
        knobs.cache.dir = str(folder.absolute())
        yield
