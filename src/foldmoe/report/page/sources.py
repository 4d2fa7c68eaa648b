"""Which result files there are, by kind, and what reads each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from foldmoe import result_file
from foldmoe.bench.result import KIND as LAYER
from foldmoe.bench.result import LayerResult
from foldmoe.bench.serve.results import KIND as SERVE
from foldmoe.bench.serve.results import ServeResult
from foldmoe.evaluate import result as accuracy
from foldmoe.report.page.accuracy import accuracy_section
from foldmoe.report.page.layer import layer_section
from foldmoe.report.page.plan import KIND as PLAN
from foldmoe.report.page.plan import PlanFile, plan_section
from foldmoe.report.page.serve import serve_section

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from foldmoe.report.page.blocks import Section


READERS: dict[str, Callable[[Path], Section]] = {
    PLAN: lambda path: plan_section(PlanFile.load(path), path.name),
    LAYER: lambda path: layer_section(LayerResult.load(path), path.name),
    SERVE: lambda path: serve_section(ServeResult.load(path), path.name),
    accuracy.KIND: lambda path: accuracy_section(accuracy.load(path), path.name),
}
"""By kind, in the order that sections take on the page."""


def sections(paths: Iterable[Path]) -> tuple[list[Section], dict[Path, str]]:
    """Read every result file.

    Args:
        paths: files, and folders whose ``.json`` files are all looked at.

    Returns:
        The sections, by kind and then by path; and JSON files of the folders that are not shown, each with the reason:
        a folder of results holds logs, raw outputs, results of other kinds and of newer versions too.

    Raises:
        ValueError: a file that was named and is none that can be shown, or no result file at all.
        OSError: no such file.
    """
    order = list(READERS)
    found: list[tuple[int, Path, Section]] = []
    passed_over: dict[Path, str] = {}
    for path in dict.fromkeys(paths):
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            try:
                kind = _kind(file)
                found.append((order.index(kind), file, _section(READERS[kind], file)))
            except ValueError as error:
                if file == path:
                    raise
                passed_over[file] = str(error)
    if not found:
        raise ValueError(
            "no result files: write some with 'foldmoe bench layer --out FILE.json' or 'foldmoe plan MODEL --json > "
            "FILE.json'" + "".join(f"; passed over: {reason}" for reason in passed_over.values())
        )
    found.sort(key=lambda entry: entry[:2])
    return _told_apart([section for *_, section in found], [file for _, file, _ in found]), passed_over


def _section(read: Callable[[Path], Section], file: Path) -> Section:
    """What is wrong with a file names it, whoever found it."""
    try:
        return read(file)
    except (ValueError, ArithmeticError) as error:
        raise ValueError(error if str(file) in str(error) else f"{file}: {error}") from error


def _told_apart(sections: list[Section], files: list[Path]) -> list[Section]:
    """Sections of one title, such as two runs of one layer, get their files' names, and folders' where needed."""
    titles = Counter(section.title for section in sections)
    names = Counter((section.title, file.name) for section, file in zip(sections, files, strict=True))
    return [
        replace(section, title=f"{section.title}, {_name(file, names[section.title, file.name] > 1)}")
        if titles[section.title] > 1
        else section
        for section, file in zip(sections, files, strict=True)
    ]


def _name(file: Path, with_folder: bool) -> str:
    return f"{file.parent.name}/{file.name}" if with_folder else file.name


def _kind(file: Path) -> str:
    """The kind of a result file, a key of :data:`READERS`."""
    kind = str(result_file.read(file)["kind"])
    if kind not in READERS:
        raise ValueError(f"{file} holds {kind!r}, which this foldmoe cannot show; it knows {', '.join(READERS)}")
    return kind
