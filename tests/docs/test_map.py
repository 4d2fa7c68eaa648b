"""CONTRIBUTING.md's map of the house is true: every room is on it, and imports go down its list only."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "foldmoe"


def rooms() -> dict[str, int]:
    """Room to its row in the map; a smaller number stands above."""
    found = {}
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for row, cell in enumerate(re.findall(r"^\| (`.+?`) \|", text, re.MULTILINE)):
        for name in re.findall(r"`([^`]+)`", cell):
            found[name.rstrip("/").removesuffix(".py")] = row
    return found


def imports(node: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, room) of every import of ours that happens at run time, deferred ones too."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        if isinstance(child, ast.ImportFrom) and child.module and child.module.split(".")[0] == "foldmoe":
            _, *below = child.module.split(".")
            yield from ((child.lineno, name) for name in (below[:1] or [alias.name for alias in child.names]))
        elif isinstance(child, ast.Import):
            names = [alias.name.split(".") for alias in child.names]
            yield from ((child.lineno, name[1]) for name in names if name[0] == "foldmoe" and len(name) > 1)
        yield from imports(child)


def test_every_room_is_on_the_map() -> None:
    there = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    there |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert there == set(rooms())


def test_imports_go_down_the_map() -> None:
    order, wrong = rooms(), []
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        for line, target in imports(ast.parse(path.read_text())):
            if order[target] < order[room]:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {room} imports {target}, which stands above it")
    assert not wrong, "\n".join(wrong)
