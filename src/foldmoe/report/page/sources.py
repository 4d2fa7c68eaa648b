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


def sections(paths: Iterable[Path]) -> tuple[list[Section], list[Path]]:
    """Read every result file.

    Args:
        paths: files, and folders whose ``.json`` files are all looked at.

    Returns:
        The sections, by kind and then by path; and JSON files of the folders that are no result files (a folder of
        results holds logs and raw outputs too).

    Raises:
        ValueError: a result file of an unknown kind, a damaged one, or no result file at all.
        OSError: no such file.
    """
    order = list(READERS)
    found: list[tuple[int, Path]] = []
    passed_over: list[Path] = []
    for path in dict.fromkeys(paths):
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            kind = _kind(file, named=file == path)
            if kind is None:
                passed_over.append(file)
            elif kind not in READERS:
                raise ValueError(f"{file} holds {kind!r}, which this foldmoe cannot show; it knows {', '.join(order)}")
            else:
                found.append((order.index(kind), file))
    if not found:
        raise ValueError(
            "no result files: write some with 'foldmoe bench layer --out FILE.json' or 'foldmoe plan MODEL --json > "
            "FILE.json'"
        )
    files = [file for _, file in sorted(found)]
    return _told_apart([READERS[order[rank]](file) for rank, file in sorted(found)], files), passed_over


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


def _kind(file: Path, *, named: bool) -> str | None:
    """The kind of a result file; None for other files of a folder. A file that was named must be one."""
    try:
        return str(result_file.read(file)["kind"])
    except ValueError:
        if named:
            raise
        return None
