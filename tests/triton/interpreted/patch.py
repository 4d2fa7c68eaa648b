"""Triton's interpreter turns a one-element array into a loop bound with ``int()``, which numpy 2.4 and later refuse."""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Make loop bounds work whatever numpy is installed."""
    from triton.runtime import interpreter

    original = interpreter._patch_lang_tensor
    if getattr(original, "patched", False):
        return

    def patched(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patched.patched = True  # type: ignore[attr-defined]
    interpreter._patch_lang_tensor = patched
