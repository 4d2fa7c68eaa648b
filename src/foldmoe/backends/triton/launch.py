"""Launching a kernel by the names of its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foldmoe.runtime.kernels import Variant, start

if TYPE_CHECKING:
    from torch import Tensor


def launch(
    kernel: Any, grid: tuple[int, ...], tensors: dict[str, Tensor], numbers: dict[str, Any], **constants: Any
) -> None:
    """``kernel[grid](**tensors, **numbers, **constants)``.

    Raises:
        RuntimeError, OSError: see :func:`foldmoe.runtime.kernels.start`.
    """
    device = next(iter(tensors.values())).device
    key = (kernel, *_facts(tensors, numbers, kernel), device, *sorted(constants.items()))
    start(kernel, grid, Variant(key, device, constants), **tensors, **numbers, **constants)


def _facts(tensors: dict[str, Tensor], numbers: dict[str, Any], kernel: Any) -> list[Any]:
    """All that Triton may compile a new variant for."""
    anonymous = _plain(kernel)
    facts: list[Any] = [(name, t.dtype, t.data_ptr() % 16 == 0) for name, t in tensors.items() if name not in anonymous]
    facts += [(name, t.dtype) for name, t in tensors.items() if name in anonymous]
    facts += [(name, n == 1, n % 16 == 0, n >= 2**31) for name, n in numbers.items() if name not in anonymous]
    return facts


def _plain(kernel: Any) -> frozenset[str]:
    """Parameters whose values Triton does not look at."""
    names: set[str] = set()
    for parameter in getattr(kernel, "params", ()):
        if parameter.do_not_specialize or parameter.do_not_specialize_on_alignment:
            names.add(parameter.name)
    return frozenset(names)
