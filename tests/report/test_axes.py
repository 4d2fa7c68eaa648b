"""Axes: values keep their order and stay inside; ticks are few, round and on the axis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foldmoe.report.page.axes import Axis, thinned
from foldmoe.report.page.charts import number

VALUES = st.lists(st.floats(1e-6, 1e9), min_size=1, max_size=8)


@given(VALUES, st.booleans())
def test_values_lie_on_their_axis_in_order(values: list[float], log: bool) -> None:
    axis = Axis.over(values, 60, 460, log=log)
    places = [axis.at(value) for value in sorted(values)]
    assert places == sorted(places)
    assert all(60 <= place <= 460 for place in places)


@given(VALUES, st.booleans())
def test_ticks_are_few_and_on_the_axis(values: list[float], log: bool) -> None:
    axis = Axis.over(values, 60, 460, log=log)
    ticks = axis.ticks()
    assert 1 <= len(ticks) <= 7
    assert all(axis.low <= tick <= axis.high for tick in ticks)
    assert ticks == sorted(set(ticks))


def test_an_axis_may_run_upwards_and_below_zero() -> None:
    axis = Axis(-10, 10, 280, 0)
    assert (axis.at(-10), axis.at(0), axis.at(10)) == (280, 140, 0)
    assert axis.ticks() == [-10, -5, 0, 5, 10]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(40, 2000, [50, 100, 200, 500, 1000, 2000]), (1.0, 4.9, [1, 2, 3, 4]), (3, 5e5, [10, 100, 1000, 1e4, 1e5])],
)
def test_log_ticks_are_the_round_numbers_that_fit(low: float, high: float, expected: list[float]) -> None:
    assert Axis(low, high, 0, 100, log=True).ticks() == pytest.approx(expected)


def test_crowded_values_are_thinned_and_the_last_one_stays() -> None:
    axis = Axis(1, 1024, 0, 100, log=True)  # a factor of two every ten units
    assert thinned([1, 2, 4, 512, 1024], axis, 15) == [1, 4, 1024]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (46, "46"), (1037.4, "1,037"), (0.0524, "0.0524"), (8.115, "8.12"), (-2.5, "-2.5"), (2048, "2,048")],
)
def test_numbers_keep_three_digits_or_all_whole_ones(value: float, text: str) -> None:
    assert number(value) == text
