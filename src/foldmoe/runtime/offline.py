"""Compiling for a GPU that is not here: a driver that only answers what Triton's compiler asks."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

WARP = {"cuda": 32, "rocm": 64}


class StandIn:
    """In place of a GPU's driver.

    Args:
        kind: "cuda" or "rocm". arch: ``sm_90`` or ``gfx942``.
    """

    def __init__(self, kind: str, arch: str) -> None:
        self.kind, self.arch = kind, arch

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        if self.kind == "cuda":
            return GPUTarget("cuda", int(self.arch.removeprefix("sm_")), WARP["cuda"])
        return GPUTarget("hip", self.arch, WARP["rocm"])

    def get_current_device(self) -> str:
        """A name that no device has: Triton keeps compiled kernels by device, and these must not meet a real one's."""
        return f"stand-in for {self.arch}"

    def get_current_stream(self, device: object = None) -> int:
        return 0


@contextmanager
def standing_in(kind: str, arch: str) -> Iterator[None]:
    """Triton compiles for ``arch`` while this is open."""
    from triton.runtime import driver

    kept = driver._active  # reset_active() would look for a real driver, and there may be none
    driver.set_active(StandIn(kind, arch))
    try:
        yield
    finally:
        driver._active = kept
