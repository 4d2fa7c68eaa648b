"""Memory that nobody wrote is NaN, so that a kernel which reads it or leaves a part of its output out is found."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from foldmoe.runtime import workspace

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def nan_in_new_memory() -> Iterator[None]:
    """``torch.empty`` gives NaN (bytes of 255 as uint8): outputs and scratch memory, in a graph at each replay.

    Only warns where torch has no deterministic kernel: the oracle's products run in cuBLAS, which would want a variable
    in the environment before CUDA starts.
    """
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def poison() -> None:
    """NaN in the scratch memory that the next call takes over from the last one, whichever mode that ran in."""
    with torch.inference_mode():
        for held in workspace._held.values():
            held.memory.fill_(255)
