"""Calls of libraries that are not installed here: recorded over stand-ins, and bound to the signatures in their source.

Source is that of an installed package, or lies under ``PEER_SOURCES`` (folders joined by ``:``): unpacked
wheels of the releases that the peers name, whose Python alone is read.
"""

from __future__ import annotations

import ast
import os
import sys
from importlib.machinery import PathFinder
from inspect import Parameter, Signature
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest


class Recorder:
    """Modules made of stand-ins, and what was passed to each.

    Attributes:
        calls: by (module, function), positional and named arguments of every call.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.calls: dict[tuple[str, str], list[tuple[tuple[Any, ...], dict[str, Any]]]] = {}

    def module(self, name: str, **members: Any) -> None:
        """Put a module in place; functions among the members are recorded, other objects are not."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            parent = ".".join(parts[:end])
            if parent not in sys.modules or end == len(parts):
                module = sys.modules.get(parent) or ModuleType(parent)
                self.monkeypatch.setitem(sys.modules, parent, module)
            if end > 1:
                self.monkeypatch.setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module, raising=False)
            module = sys.modules[parent]
        for member, value in members.items():
            kept = self._recorded(name, member, value) if callable(value) and not isinstance(value, type) else value
            self.monkeypatch.setattr(sys.modules[name], member, kept, raising=False)

    def _recorded(self, module: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.setdefault((module, name), []).append((args, kwargs))
            return function(*args, **kwargs)

        return call


def source(module: str) -> Path | None:
    """The file of a module, looked for without importing anything."""
    relative = Path(*module.split("."))
    folders = [Path(folder) for folder in os.environ.get("PEER_SOURCES", "").split(":") if folder]
    package = PathFinder.find_spec(module.split(".")[0])  # stand-ins in sys.modules are not looked at
    folders += [Path(folder).parent for folder in (package.submodule_search_locations or [])] if package else []
    for folder in folders:
        for path in (folder / relative.with_suffix(".py"), folder / relative / "__init__.py"):
            if path.is_file():
                return path
    return None


def signature(path: Path, name: str) -> Signature | None:
    """Of a function in a file (also inside ``try`` or ``if``), from its text; None if the file defines none."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _signature(node.args)
    return None


def _signature(arguments: ast.arguments) -> Signature:
    given = [*arguments.posonlyargs, *arguments.args]
    required = len(given) - len(arguments.defaults)
    found = [
        Parameter(a.arg, Parameter.POSITIONAL_OR_KEYWORD, default=Parameter.empty if place < required else None)
        for place, a in enumerate(given)
    ]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, Parameter.VAR_POSITIONAL))
    found += [
        Parameter(a.arg, Parameter.KEYWORD_ONLY, default=Parameter.empty if default is None else None)
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(found)
