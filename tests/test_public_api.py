"""The public API, frozen: ``public_api.txt`` lists every name with its parameters.

Adding a name is a decision: add its line. Removing or changing one breaks users: move the old line under
``[removed]`` and say so in CHANGELOG.md. ``python tests/test_public_api.py`` prints what the code has now.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("public_api.txt")

MODULES = (
    "foldmoe",
    "foldmoe.backends",
    "foldmoe.formats",
    "foldmoe.moe",
    "foldmoe.planner",
    "foldmoe.parallel",
    "foldmoe.integrations.transformers",
)
"""Public in whole: everything in their ``__all__``."""

SINGLE = (
    "foldmoe.formats.e8m0.decode",
    "foldmoe.formats.e8m0.encode",
    "foldmoe.formats.fp8.dequantize_block",
    "foldmoe.formats.fp8.quantize_block",
    "foldmoe.formats.mxfp4.dequantize",
    "foldmoe.formats.mxfp4.quantize",
    "foldmoe.moe.slots.SlotMap",
    "foldmoe.moe.slots.append_shared_slot",
)
"""Public by themselves."""


def _parameters(thing: object) -> str:
    """Names, kinds and which have defaults; annotations may change."""
    parts, star = [], False
    for name, p in inspect.signature(thing).parameters.items():  # type: ignore[arg-type]
        if name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        prefix = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        star = star or p.kind is p.VAR_POSITIONAL
        parts.append(prefix + name + ("" if p.default is p.empty else "="))
    return f"({', '.join(parts)})"


def _members(path: str, thing: type) -> list[str]:
    found = []
    for name, member in vars(thing).items():
        if name.startswith("_"):
            continue
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if inspect.isfunction(function):
            found.append(f"{path}.{name}{_parameters(getattr(thing, name))}")
        elif isinstance(member, property):
            found.append(f"{path}.{name}")
    return found


def _describe(path: str, thing: object) -> list[str]:
    if not isinstance(thing, type):
        return [f"{path}{_parameters(thing)}"]
    if issubclass(thing, enum.Enum):
        return [path] + [f"{path}.{member.name}" for member in thing] + _members(path, thing)
    if issubclass(thing, Exception):
        return [f"{path}({thing.__mro__[1].__name__})"]
    if getattr(thing, "_is_protocol", False):
        return [path, *_members(path, thing)]
    own = [f"{path}.{field.name}" for field in fields(thing)] if is_dataclass(thing) else []
    return [f"{path}{_parameters(thing)}", *own, *_members(path, thing)]


def current() -> list[str]:
    """One line a name, sorted."""
    paths = [f"{module}.{name}" for module in MODULES for name in importlib.import_module(module).__all__]
    lines = [*_environment(), *_commands()]
    known: dict[int, str] = {}
    for path in (*paths, *SINGLE):
        module, _, name = path.rpartition(".")
        thing = getattr(importlib.import_module(module), name)
        first = known.setdefault(id(thing), path)
        lines += _describe(path, thing) if first == path else [f"{path} is {first}"]
    return sorted(lines)


def _environment() -> list[str]:
    from foldmoe import settings

    names = (*settings._POLICY, *settings._PATHS, *settings._FLAGS)
    return [f"environment {settings.PREFIX}{name}" for name in names]


def _commands() -> list[str]:
    from foldmoe.cli.main import app

    def walk(command: object, words: str) -> list[str]:
        below = getattr(command, "commands", None)
        return [words] if below is None else [line for name in below for line in walk(below[name], f"{words} {name}")]

    return [f"command {words}" for words in walk(typer.main.get_command(app), "foldmoe")]


def listed() -> tuple[list[str], list[str]]:
    """Lines that are public, and those that were."""
    public, _, removed = LIST.read_text().partition("[removed]\n")
    return public.split("\n\n", 1)[1].strip().splitlines(), removed.strip().splitlines()


@pytest.fixture(scope="module", autouse=True)
def _transformers() -> None:
    pytest.importorskip("transformers", reason="part of the public API needs the extra transformers")


def test_public_api_is_as_listed() -> None:
    public, _ = listed()
    now = current()
    added, gone = sorted(set(now) - set(public)), sorted(set(public) - set(now))
    assert not gone, f"gone or changed: {gone}\nmove each line under [removed] and tell users in CHANGELOG.md"
    assert not added, f"new: {added}\nif that is meant, add each line to {LIST.name}"
    assert public == sorted(public)


def test_what_was_removed_is_in_the_changelog() -> None:
    _, removed = listed()
    changes = (ROOT / "CHANGELOG.md").read_text()
    for line in removed:
        assert line not in current(), f"{line} is back: take it out of [removed]"
        kind, _, rest = line.partition(" ")
        name = rest if kind in ("command", "environment") else re.split(r"[(\s]", line)[0].rpartition(".")[2]
        assert name in changes, f"CHANGELOG.md does not mention {name}, which was removed"


def test_api_page_names_public_things_and_all_of_foldmoe_itself() -> None:
    page = set(re.findall(r"^::: (\S+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE))
    public = {re.split(r"[(\s]", line)[0] for line in listed()[0]}
    assert page <= public, sorted(page - public)
    assert {f"foldmoe.{name}" for name in importlib.import_module("foldmoe").__all__} <= page


def test_every_public_name_has_a_docstring() -> None:
    for module in MODULES:
        loaded = importlib.import_module(module)
        bare = [name for name in loaded.__all__ if not inspect.getdoc(getattr(loaded, name))]
        assert not bare, f"{module}: {bare}"


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "foldmoe" / "py.typed").exists()


if __name__ == "__main__":
    print("\n".join(current()))
