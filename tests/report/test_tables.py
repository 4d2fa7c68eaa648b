"""Tables of layer timings in a terminal: figures are whole at any width, ties and noise as far as they are known."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from foldmoe.bench.compare import compare
from foldmoe.report.bench_table import HEADINGS, bench_table, cells
from foldmoe.report.compare_table import compare_table
from tests.support.results import layer_result

if TYPE_CHECKING:
    from rich.console import RenderableType


def _printed(table: RenderableType, width: int) -> str:
    file = io.StringIO()
    Console(file=file, width=width, markup=False, emoji=False).print(table)
    return file.getvalue()


def _figures(text: str) -> set[str]:
    """Of every line of a table, its cells."""
    return {cell.strip() for line in text.splitlines() for cell in re.split("[│┃]", line)}


@pytest.mark.parametrize(("width", "gone"), [(60, {"low..high", "x floor"}), (80, {"low..high"}), (140, set())])
def test_figures_are_whole_and_what_has_no_room_is_named(width: int, gone: set[str]) -> None:
    result = layer_result(times=100.0)
    text = _printed(bench_table(result), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    left_out = {heading for heading in HEADINGS if not any(heading in line for line in text.splitlines()[:6])}
    assert gone <= left_out
    assert ("left out for want of room: TFLOP/s" in text) == bool(left_out)
    shown = [i for i, heading in enumerate(HEADINGS) if heading not in (*left_out, "arm")]
    assert {HEADINGS[i] for i in shown} >= {"tokens", "us", "noise", "vs peer"}
    assert {cells(row, result)[i] for row in result.rows for i in shown} <= _figures(text)


@pytest.mark.parametrize("width", [60, 80, 140])
def test_a_comparisons_figures_are_whole_too(width: int) -> None:
    old, new = layer_result(times=1000.0), layer_result(times=1250.0)
    text = _printed(compare_table(compare(old, new), "old.json"), width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert {f"{row.seconds * 1e6:,.1f}" for row in new.rows} | {"+25.0%"} <= _figures(text)
    assert ("left out for want of room: noise of both" in text) == (width < 140)


def test_where_nothing_fits_figures_break_into_lines() -> None:
    text = _printed(bench_table(layer_result()), 30)
    assert "…" not in text


def test_noise_of_too_few_rounds_is_blank() -> None:
    few, enough = layer_result(rounds=3), layer_result(rounds=4)
    noise = HEADINGS.index("noise")
    assert {cells(row, few)[noise] for row in few.rows} == {""}
    assert {cells(row, enough)[noise] for row in enough.rows} == {"1.0%"}


def test_a_tie_is_within_the_noise_of_both_arms() -> None:
    result = layer_result(tokens=(1,))
    own, *_, peer = result.rows
    result.rows[:] = [replace(own, noise=0.01, against=1.03), replace(peer, noise=0.025, against=1.0)]
    versus = HEADINGS.index("vs peer")
    assert [cells(row, result)[versus] for row in result.rows] == ["1.030 tie", "1.000"]
    result.rows[1] = replace(peer, noise=0.01, against=1.0)
    assert cells(result.rows[0], result)[versus] == "1.030"
