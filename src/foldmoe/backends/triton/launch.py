"""Launching a kernel by the names of its parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foldmoe.runtime import offline
from foldmoe.runtime.kernels import Variant, start
from foldmoe.runtime.workspace import SHORT


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: dict[str, Tensor], numbers: dict[str, Any], **constants: Any
) -> None:
    """``kernel[grid](**tensors, **numbers, **constants)`` on the tensors' device.

    Raises:
        RuntimeError, OSError: see :func:`foldmoe.runtime.kernels.start`.
    """
    device = next(iter(tensors.values())).device
    key = (kernel, *_facts(tensors, numbers, kernel), device, *sorted(constants.items()))
    start(kernel, grid, Variant(key, device, constants), **tensors, **numbers, **constants)


def launch_in_order(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """The same, tensors and numbers in the order of the kernel's parameters."""
    named = dict(zip(kernel.arg_names, arguments, strict=False))
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    numbers = {name: value for name, value in named.items() if name not in tensors}
    launch(kernel, grid, tensors, numbers, **constants)


def _facts(tensors: dict[str, Tensor], numbers: dict[str, Any], kernel: Any) -> list[Any]:
    """All that Triton may compile a new variant for."""
    anonymous = _plain(kernel)
    facts: list[Any] = [(name, t.dtype, t.data_ptr() % 16 == 0) for name, t in tensors.items() if name not in anonymous]
    facts += [(name, t.dtype) for name, t in tensors.items() if name in anonymous]
    if torch.version.hip is not None or offline.kind == "rocm":  # offsets of 32 bits into a short storage
        facts += [(name, t.untyped_storage().nbytes() <= SHORT) for name, t in tensors.items()]
    facts += [(name, n == 1, n % 16 == 0, n >= 2**31) for name, n in numbers.items() if name not in anonymous]
    facts += [(name, n >= 2**31) for name, n in numbers.items() if name in anonymous]
    facts.append(tuple(map(type, numbers.values())))  # 2 is an int32 to Triton, 2.0 a float32
    return facts


_plain_names: dict[int, tuple[Any, frozenset[str]]] = {}
"""By ``id``, with the kernel: its hash is its cache key, which :func:`foldmoe.runtime.kernels.start` has to make."""


def _plain(kernel: Any) -> frozenset[str]:
    """Parameters whose values Triton does not look at."""
    if id(kernel) not in _plain_names:
        plain = (p for p in getattr(kernel, "params", ()) if p.do_not_specialize or p.do_not_specialize_on_alignment)
        _plain_names[id(kernel)] = kernel, frozenset(parameter.name for parameter in plain)
    return _plain_names[id(kernel)][1]
