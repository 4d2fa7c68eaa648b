"""vLLM's source, read without importing it: what the plugin relies on, of versions that are not installed here too."""

from __future__ import annotations

import ast
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

VARIABLE = "VLLM_SOURCES"
"""Folders with a ``vllm`` folder in each, divided by colons; ``make test-vllm-sources`` fills them from the wheels."""


@dataclass
class Source:
    """One version's files.

    Args:
        folder: vLLM's package.
    """

    folder: Path
    _trees: dict[str, ast.Module] = field(default_factory=dict)

    def tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            self._trees[file] = ast.parse((self.folder / file).read_text(encoding="utf-8"))
        return self._trees[file]

    def node(self, file: str, name: str) -> ast.ClassDef | ast.FunctionDef:
        """A class or function, ``Class.method`` for a method.

        Raises:
            KeyError: it is not there.
        """
        found: ast.AST = self.tree(file)
        for part in name.split("."):
            inside = (n for n in ast.walk(found) if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part)
            match = next(inside, None)
            if match is None:
                raise KeyError(f"{self.folder / file} has no {name}")
            found = match
        assert isinstance(found, ast.ClassDef | ast.FunctionDef)
        return found

    def arguments(self, file: str, name: str) -> list[str]:
        """Names of a function's arguments, without self; ``**`` for any keyword."""
        function = self.node(file, name)
        assert isinstance(function, ast.FunctionDef)
        stated = function.args
        names = [a.arg for a in (*stated.posonlyargs, *stated.args, *stated.kwonlyargs) if a.arg not in ("self", "cls")]
        return [*names, "**"] if stated.kwarg else names

    def attributes(self, file: str, name: str) -> set[str]:
        """A class's fields, methods, properties and what its methods set on ``self``."""
        found = set()
        for node in ast.walk(self.node(file, name)):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
        return found

    def abstract(self, file: str, name: str) -> set[str]:
        """Methods that a subclass must have."""
        node = self.node(file, name)
        return {
            function.name
            for function in node.body
            if isinstance(function, ast.FunctionDef)
            and any(isinstance(mark, ast.Name) and mark.id == "abstractmethod" for mark in function.decorator_list)
        }

    def exports(self, file: str) -> set[str]:
        """Names that a module imports, defines or lists."""
        found = set()
        for node in ast.walk(self.tree(file)):
            if isinstance(node, ast.ImportFrom):
                found |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.ClassDef | ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
        return found

    def set_before(self, file: str, name: str, call: str) -> set[str]:
        """Attributes of ``self`` that a method sets before it first calls ``self.call``."""
        lines = {}
        called = 0
        for node in ast.walk(self.node(file, name)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                lines.setdefault(node.attr, node.lineno)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == call:
                called = called or node.lineno
        return {attribute for attribute, line in lines.items() if line < called}

    def keywords(self, file: str, name: str, call: str) -> set[str]:
        """Keywords with which a function calls ``call``."""
        found: set[str] = set()
        for node in ast.walk(self.node(file, name)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(call):
                found |= {keyword.arg for keyword in node.keywords if keyword.arg}
        return found


def at_hand() -> dict[str, Source]:
    """The installed vLLM, and those in :data:`VARIABLE`, by folder."""
    folders = [Path(folder) for folder in os.environ.get(VARIABLE, "").split(":") if folder]
    found = {str(folder): Source(folder / "vllm") for folder in folders}
    spec = find_spec("vllm")
    if spec is not None and spec.submodule_search_locations:
        found["installed"] = Source(Path(spec.submodule_search_locations[0]))
    return found
