"""Pages stay true: Python blocks run, commands exist with their options, pictures have words, figures have one home.

A block that cannot run here has ``<!-- test: reason -->`` on the line before it, and skips with that reason
(``gpu`` runs where there is one, ``hub`` with HUB_TESTS=1). The blocks of a page share their names, in order, like a
reader's session.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import typer

from foldmoe.cli.main import app
from foldmoe.planner import capability

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"(?:^<!-- test: (?P<mark>.+) -->\n)?^```(?P<lang>\w+)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
NEEDS = {"transformers.md": "transformers"}


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: Path
    line: int
    language: str
    body: str
    mark: str

    def __str__(self) -> str:
        return f"{self.page.stem}:{self.line}"


def blocks(language: str) -> list[Block]:
    found = []
    for page in (*PAGES, ROOT / "README.md"):
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text.count("\n", 0, match.start("body"))
            found.append(Block(page, line + 1, match["lang"], match["body"], match["mark"] or ""))
    return [block for block in found if block.language == language]


def pages_with_python() -> list[Path]:
    return sorted({block.page for block in blocks("python") if block.page.parent.name == "docs"})


@pytest.mark.parametrize("page", pages_with_python(), ids=lambda page: page.stem)
def test_python_blocks_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.name in NEEDS:
        pytest.importorskip(NEEDS[page.name], reason=f"{page.name} needs the extra {NEEDS[page.name]}")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(capability, "_REGISTRY", dict(capability._REGISTRY))
    names: dict[str, object] = {"__name__": page.stem}
    ran = 0
    for block in (b for b in blocks("python") if b.page == page):
        source = "\n" * (block.line - 1) + block.body  # a traceback names the page's own line
        code = compile(source, str(page), "exec")
        if block.mark and not _present(block.mark):
            continue
        with contextlib.redirect_stdout(io.StringIO()):
            exec(code, names)
        ran += 1
    assert ran, f"every block of {page.name} is marked"


def _present(mark: str) -> bool:
    return {"gpu": torch.cuda.is_available(), "hub": os.environ.get("HUB_TESTS") == "1"}.get(mark, False)


MARKED = [block for block in blocks("python") if block.mark]


@pytest.mark.parametrize("block", MARKED, ids=str)
def test_marked_blocks_are_python_at_least(block: Block) -> None:
    compile(block.body, str(block.page), "exec")
    if not _present(block.mark):
        pytest.skip(f"{block} does not run here: {block.mark}")


def commands() -> list[tuple[str, list[str]]]:
    """(where, arguments) of every ``foldmoe`` command line in a fenced shell block."""
    found = []
    for block in blocks("bash"):
        for number, line in enumerate(block.body.replace("\\\n", " ").splitlines()):
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words and words[0] == "foldmoe":
                found.append((f"{block.page.stem}:{block.line + number}", words[1:]))
    return found


@pytest.mark.parametrize(("where", "words"), commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_commands_exist_with_their_options(where: str, words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands"):
        name = words[0]
        assert name in command.commands, f"{where}: no command {name!r}; there are: {', '.join(command.commands)}"
        command, words = command.commands[name], words[1:]
    try:
        command.make_context(command.name, list(words))
    except Exception as error:
        raise AssertionError(f"{where}: {error}") from error


def test_environment_variables_on_the_pages_are_read() -> None:
    from foldmoe import settings

    known = {settings.PREFIX + name for name in (*settings._POLICY, *settings._PATHS, *settings._FLAGS)}
    for page in PAGES:
        named = set(re.findall(r"\bFOLDMOE_[A-Z_]+[A-Z]\b", page.read_text()))
        assert named <= known, f"{page.name} names {sorted(named - known)}"
    assert known <= set(re.findall(r"FOLDMOE_[A-Z_]+", (ROOT / "docs" / "strategies.md").read_text()))


def test_pictures_have_words() -> None:
    shown: set[str] = set()
    for page in PAGES:
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]+)\)", page.read_text()):
            assert len(alt.split()) > 5, f"{page.name}: {target} needs a text alternative"
            shown.add(target)
    files = {f"images/{path.name}" for path in (ROOT / "docs" / "images").iterdir()}
    assert shown == files
    for file in files:
        root = ElementTree.parse(ROOT / "docs" / file).getroot()
        for part in ("title", "desc"):
            assert root.findtext(f"{{http://www.w3.org/2000/svg}}{part}"), f"{file} has no <{part}>"
        assert "http" not in ElementTree.tostring(root, encoding="unicode").replace("http://www.w3.org/2000/svg", "")


def test_measured_figures_stand_in_the_readme_alone() -> None:
    readme = (ROOT / "README.md").read_text()
    for section in ("served", "figures", "limits"):
        assert readme.count(f"[start:{section}]") == readme.count(f"[end:{section}]") == 1
    for page in PAGES:
        if page.name == "parallel.md":  # times over several GPUs have tables of their own, under their command
            continue
        found = re.findall(r"\d[\d.,]* ?(?:us|µs|tok/s|GB/s|TB/s|TFLOP/s)\b", page.read_text())
        assert not found, f"{page.name} quotes {found}; include README.md's figures instead"


def test_parts_of_the_readme_that_pages_include_link_to_no_page() -> None:
    """A link in them would lead from the README or from the page, never from both."""
    parts = re.findall(r"\[start:(\w+)\] -->(.*?)<!-- --8<-- \[end:", (ROOT / "README.md").read_text(), re.DOTALL)
    assert {name for name, _ in parts} >= {"served", "figures", "limits"}
    assert not [
        (name, link) for name, text in parts for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link
    ]


def test_every_page_is_in_the_navigation() -> None:
    nav = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2].partition("plugins:")[0]
    assert {page.name for page in PAGES} == set(re.findall(r"\S+\.md", nav))
