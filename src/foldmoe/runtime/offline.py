"""Compiling for a GPU that is not here: a driver that only answers what Triton's compiler asks."""

from __future__ import annotations

from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

WARP = {"cuda": 32, "rocm": 64}

kind: str | None = None
"""What Triton compiles for inside :func:`standing_in`; None outside."""


class StandIn:
    """In place of a GPU's driver, in the thread that makes it; other threads, which may serve, get the real one.

    Args:
        kind: "cuda" or "rocm". arch: ``sm_90`` or ``gfx942``.
        replaced: the driver that was active, or None where Triton has not looked for one yet.
    """

    def __init__(self, kind: str, arch: str, replaced: Any = None) -> None:
        self.kind, self.arch = kind, arch
        self._thread, self._replaced = get_ident(), replaced

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or get_ident() == self._thread:
            raise AttributeError(f"no GPU is here to ask for {name}")
        return getattr(self._real(), name)

    def _real(self) -> Any:
        from triton.runtime import driver

        return self._replaced or driver.default

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if get_ident() != self._thread:
            return self._real().get_current_target()
        if self.kind == "cuda":
            return GPUTarget("cuda", int(self.arch.removeprefix("sm_")), WARP["cuda"])
        return GPUTarget("hip", self.arch, WARP["rocm"])

    def get_current_device(self) -> Any:
        """A name that no device has: Triton keeps compiled kernels by device, and these must not meet a real one's."""
        return f"stand-in for {self.arch}" if get_ident() == self._thread else self._real().get_current_device()

    def get_current_stream(self, device: Any = None) -> Any:
        return 0 if get_ident() == self._thread else self._real().get_current_stream(device)


@contextmanager
def standing_in(target: str, arch: str) -> Iterator[None]:
    """Triton compiles for ``arch``, of "cuda" or "rocm", while this is open."""
    global kind
    from triton.runtime import driver

    kept = driver._active, kind  # reset_active() would look for a real driver, and there may be none
    driver.set_active(StandIn(target, arch, driver._active))
    kind = target
    try:
        yield
    finally:
        driver._active, kind = kept
