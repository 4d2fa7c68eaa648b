"""The one place where a kernel starts: into our cache, never compiled during a graph capture, or only compiled."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import RLock, local
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from foldmoe.runtime import kernel_cache
from foldmoe.runtime.devices import capturing, elsewhere

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_log = logging.getLogger("foldmoe")
_started: dict[tuple[Any, ...], Any] = {}
"""The compiled kernel of each variant that has started; None for what is none, as under Triton's interpreter."""
_first = RLock()
"""Held over a first start: it turns settings of Triton's, which are the process's, and turns them back."""


class _Here(local):
    """What holds in one thread."""

    compiler: Compiler | None = None


_here = _Here()


@dataclass
class Compiler:
    """What :func:`start` does instead of starting, while a plan's kernels are compiled ahead.

    Args:
        wanted: asked once for each variant, with its kernel's name; False leaves it out.
        done: gets each compiled kernel.
    """

    wanted: Callable[[str], bool]
    done: Callable[[Any], None]
    _met: set[tuple[Any, ...]] = field(default_factory=set)

    def compile(self, kernel: Any, variant: Variant, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if variant.key in self._met:
            return
        self._met.add(variant.key)
        if self.wanted(_name(kernel)):
            self.done(kernel.warmup(*arguments, grid=(1,), **named))


class Variant(NamedTuple):
    """One compiled form of a kernel.

    Args:
        key: the kernel and all that Triton may compile a new form for. Equal keys run the same binary.
        device: where it runs.
        facts: printed in errors, to find the call that needs it.
    """

    key: tuple[Any, ...]
    device: torch.device
    facts: object


def start(kernel: Any, grid: Any, variant: Variant, /, *arguments: Any, **named: Any) -> Any:
    """``kernel[grid](*arguments, **named)`` on the variant's device, current or not; inside :func:`compiling` nothing
    runs.

    Returns:
        The compiled kernel; None inside :func:`compiling`.

    Raises:
        RuntimeError: during a CUDA graph capture, if this variant has not run before in this process: compiling or
            loading it then would break the capture.
        OSError: see :func:`foldmoe.runtime.kernel_cache.used`.
    """
    _settle(kernel.__module__)  # before any look-up: a kernel's hash is its cache key
    if _here.compiler is not None:
        _here.compiler.compile(kernel, variant, arguments, named)
        return None
    if elsewhere(variant.device):
        with torch.cuda.device(variant.device):
            return start(kernel, grid, variant, *arguments, **named)
    if variant.key in _started:
        compiled = _started[variant.key]
        if compiled is None or kernel.pre_run_hooks:
            return kernel[grid](*arguments, **named)
        _again(compiled, kernel, grid, arguments, named)
        return compiled
    if capturing(variant.device):
        raise RuntimeError(
            f"foldmoe: the kernel {_name(kernel)!r} would be compiled during a CUDA graph capture; warm up first: call "
            "foldmoe.warmup(layer, tokens), or run the layer once outside the capture, with the same number of tokens "
            f"and the same kinds of arguments ({variant.facts})"
        )
    with _first, kernel_cache.used(), _unwatched(kernel):
        compiled = kernel[grid](*arguments, **named)
    _started[variant.key] = compiled if _is_compiled(compiled) else None
    return compiled


def _again(compiled: Any, kernel: Any, grid: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Start what an equal key has compiled, where Triton would look at every argument again to find it."""
    rest = _parameters(kernel)[len(arguments) :]
    values = [named.get(name, default) for name, default in rest]
    sizes = grid(named) if callable(grid) else grid
    compiled[(*sizes, 1, 1)[:3]](*arguments, *values)


@cache
def _parameters(kernel: Any) -> list[tuple[str, Any]]:
    """Names and defaults, in the order in which a compiled kernel takes all of them."""
    return [(name, parameter.default) for name, parameter in kernel.signature.parameters.items()]


def _is_compiled(found: Any) -> bool:
    from triton.compiler import CompiledKernel

    return isinstance(found, CompiledKernel)


@contextmanager
def compiling(compiler: Compiler) -> Iterator[None]:
    """This thread's kernels go to ``compiler`` while this is open, nothing runs; other threads' start as ever."""
    _here.compiler = compiler
    try:
        yield
    finally:
        _here.compiler = None


@cache
def _settle(module: str) -> None:
    """Let Triton make the cache keys of a module's functions in the order of its file, those that it imports first.

    A key holds the constants of the functions that its own calls. Triton 3.6 leaves out those of functions that have
    no key yet (see triton-lang/triton pull request 10494), so that keys would depend on which kernel a process
    starts first: what was compiled ahead, smallest batch first, would not be found by an engine that starts with its
    largest.
    """
    from triton import JITFunction

    for value in list(vars(sys.modules[module]).values()):
        if isinstance(value, JITFunction):
            if value.__module__ == module:
                _ = value.cache_key
            else:
                _settle(value.__module__)


@contextmanager
def _unwatched(kernel: Any) -> Iterator[None]:
    """Triton's hooks for compiled kernels, which engines set to watch for them, off; a log line has their news.

    Triton writes a kernel's arguments as JSON for them, which fails for a configuration of ours. It calls them for
    kernels that it finds in its cache too, which take milliseconds and no line.
    """
    from triton import knobs

    kept = knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook
    listener, compiled = knobs.compilation.listener, False

    def heard(*, cache_hit: bool, **facts: Any) -> None:
        nonlocal compiled
        compiled |= not cache_hit
        if listener is not None:
            listener(cache_hit=cache_hit, **facts)

    knobs.runtime.jit_cache_hook = knobs.runtime.jit_post_compile_hook = None
    knobs.compilation.listener = heard
    try:
        yield
    finally:
        knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = kept
        knobs.compilation.listener = listener
    if compiled and any(kept):
        _log.warning("foldmoe: kernel compilation during inference: %s", _name(kernel))


def _name(kernel: Any) -> str:
    return str(getattr(kernel, "__name__", kernel))
