"""Launching a kernel, with a clear word where a compile would fall into a graph capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_launched: set[tuple[Any, ...]] = set()


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: dict[str, Tensor], numbers: dict[str, Any], **constants: Any
) -> None:
    """``kernel[grid](**tensors, **numbers, **constants)``.

    Raises:
        RuntimeError: during a CUDA graph capture, if this variant has not run before: compiling it then would break the
            capture.
    """
    key = (kernel, *_facts(tensors, numbers, kernel), *sorted(constants.items()))
    if key not in _launched and _capturing(tensors):
        name = getattr(kernel, "__name__", str(kernel))
        raise RuntimeError(
            f"foldmoe: the Triton kernel {name!r} would be compiled during a CUDA graph capture; warm up first: run "
            "the layer once, outside the capture, with the same number of tokens and the same kinds of arguments "
            f"({constants})"
        )
    kernel[grid](**tensors, **numbers, **constants)
    _launched.add(key)


def _facts(tensors: dict[str, Tensor], numbers: dict[str, Any], kernel: Any) -> list[Any]:
    """All that Triton may compile a new variant for."""
    anonymous = _plain(kernel)
    facts: list[Any] = [(name, t.dtype, t.data_ptr() % 16 == 0) for name, t in tensors.items() if name not in anonymous]
    facts += [(name, t.dtype) for name, t in tensors.items() if name in anonymous]
    facts += [(name, n == 1, n % 16 == 0, n >= 2**31) for name, n in numbers.items() if name not in anonymous]
    return [*facts, next(iter(tensors.values())).device]


def _plain(kernel: Any) -> frozenset[str]:
    """Parameters whose values Triton does not look at."""
    names: set[str] = set()
    for parameter in getattr(kernel, "params", ()):
        if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
            names.add(parameter.name)
    return frozenset(names)


def _capturing(tensors: dict[str, Tensor]) -> bool:
    return next(iter(tensors.values())).is_cuda and torch.cuda.is_current_stream_capturing()
