"""The second stream of a device, and work on it beside the current one."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """One second stream a device, whatever the number of layers: PyTorch has 32 in all and deals them out again, so
    that a stream a layer would soon be the engine's own.
    """
    return torch.cuda.Stream(device)


@contextmanager
def beside(main: torch.cuda.Stream, side: torch.cuda.Stream) -> Iterator[None]:
    """``side`` starts behind what ``main`` holds, and ``main`` goes on behind what ``side`` got inside: after an error
    too, because a CUDA-graph capture with a stream left apart fails with a message of its own and hides the error.
    """
    side.wait_stream(main)
    try:
        yield
    finally:
        main.wait_stream(side)
