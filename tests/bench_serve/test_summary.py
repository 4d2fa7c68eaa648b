"""What runs say together: medians with and without the first, noise floor, verdicts, outliers, equal texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foldmoe.bench.serve import summary
from foldmoe.bench.serve.results import Server, ServeResult
from tests.bench_serve.support import NAME, asked, run

METRIC = summary.THROUGHPUT


def result(**values: list[float]) -> ServeResult:
    """Arms by name, ``_`` for ``-``; a value a repeat."""
    arms = tuple(name.replace("_", "-") for name in values)
    again = "serial" if "serial-again" in arms else None
    made = asked("", tuple(arm for arm in arms if not arm.endswith("-again")), repeats=3, again=again)
    made.runs = [
        run(arm, n + 1, v) for arm, found in zip(arms, values.values(), strict=True) for n, v in enumerate(found)
    ]
    return made


def test_medians_with_low_and_high_and_again_without_the_first() -> None:
    found = summary.spread(result(serial=[50.0, 100.0, 102.0]), "serial", NAME, METRIC)
    assert found == summary.Spread(100.0, 50.0, 102.0, without_first=101.0, repeats=3)
    once = summary.spread(result(serial=[50.0]), "serial", NAME, METRIC)
    assert once is not None
    assert once.without_first is None


def test_an_invalid_run_counts_nowhere() -> None:
    made = result(serial=[100.0, 100.0, 1.0], folded=[110.0])
    made.runs[2] = replace(made.runs[2], invalid=("short",))
    found = summary.spread(made, "serial", NAME, METRIC)
    assert found is not None
    assert (found.low, found.repeats) == (100.0, 2)
    made.runs[3] = replace(made.runs[3], invalid=("short",))
    assert summary.spread(made, "folded", NAME, METRIC) is None
    assert summary.change(made, "serial", "folded", NAME, METRIC) is None


@pytest.mark.parametrize(
    ("folded", "verdict"),
    [
        ([120.0, 121.0, 122.0], "better"),
        ([90.0, 91.0, 92.0], "worse"),
        ([101.5, 101.6, 101.7], "tie"),  # within the noise floor of 2 %
        ([104.0, 99.0, 105.0], "tie"),  # beyond it, but the ranges overlap
    ],
)
def test_a_change_is_real_beyond_the_noise_floor_and_where_ranges_do_not_overlap(
    folded: list[float], verdict: str
) -> None:
    made = result(serial=[100.0, 99.9, 100.1], folded=folded, serial_again=[102.0, 101.9, 102.1])
    found = summary.change(made, "serial", "folded", NAME, METRIC)
    assert found is not None
    assert found.noise == pytest.approx(0.02)
    assert found.verdict == verdict


def test_more_milliseconds_are_worse_where_more_tokens_are_better() -> None:
    made = result(serial=[100.0] * 3, folded=[120.0] * 3, serial_again=[100.0] * 3)
    throughput = summary.change(made, "serial", "folded", NAME, METRIC)
    time = summary.change(made, "serial", "folded", NAME, "mean_tpot_ms")
    assert throughput is not None
    assert time is not None
    assert (throughput.relative, throughput.verdict) == (pytest.approx(0.2), "better")
    assert (time.relative, time.verdict) == (pytest.approx(-1 / 6), "better")


def test_without_a_second_serving_of_an_arm_no_verdict_is_given() -> None:
    found = summary.change(result(serial=[100.0], folded=[200.0]), "serial", "folded", NAME, METRIC)
    assert found is not None
    assert (found.noise, found.verdict) == (None, "noise floor not measured")


@pytest.mark.parametrize("short", ["serial", "folded", "serial_again"])
@pytest.mark.parametrize("repeats", [1, 2])
def test_fewer_than_three_repeats_of_any_arm_give_no_verdict(short: str, repeats: int) -> None:
    values = {"serial": [100.0] * 3, "folded": [120.0] * 3, "serial_again": [102.0] * 3}
    found = summary.change(result(**values | {short: values[short][:repeats]}), "serial", "folded", NAME, METRIC)
    assert found is not None
    assert found.verdict == "too few repeats"
    assert found.relative == pytest.approx(0.2)
    assert found.noise == pytest.approx(0.02)


def test_repeats_beyond_those_asked_for_count_nowhere() -> None:
    made = result(serial=[100.0, 102.0, 50.0], folded=[100.0, 102.0, 50.0])
    made.runs = [replace(r, texts=("a",)) for r in made.runs]
    made.repeats = 2
    found = summary.spread(made, "serial", NAME, METRIC)
    assert found is not None
    assert (found.median, found.low, found.repeats) == (101.0, 100.0, 2)
    assert summary.outliers(made) == []
    assert summary.same_texts(made, "serial", "folded") == (2, 2)


def test_a_run_far_slower_than_the_arms_others_is_an_outlier_and_its_request_is_named() -> None:
    made = result(serial=[100.0, 100.0, 50.0], folded=[100.0, 101.0, 99.0])
    usual, slow = (0.1, 0.1, 0.1), (0.1, 2.0, 0.1)
    made.runs[:3] = [replace(r, latencies=slow if r.repeat == 3 else usual) for r in made.runs[:3]]
    (found,) = summary.outliers(made)
    assert (found.run.arm, found.run.repeat, found.slowest) == ("serial", 3, 1)
    assert found.factor == pytest.approx(2.0)


def test_a_run_that_compiled_kernels_is_an_outlier_however_fast() -> None:
    made = result(serial=[100.0, 100.0, 100.0])
    made.runs[1] = replace(made.runs[1], compiled=("_gemm",))
    assert [found.run.repeat for found in summary.outliers(made)] == [2]


@pytest.mark.parametrize(
    ("gap", "p95", "still"),
    [
        (41.3, 172.0, 41.3),
        (1.9, 20.0, None),
        (2.1, 20.0, 2.1),
        (3.0, 400.0, None),
        (None, 20.0, None),
        (41.3, None, 41.3),
    ],
)
def test_a_run_whose_server_stood_still_is_an_outlier_in_a_single_repeat(
    gap: float | None, p95: float | None, still: float | None
) -> None:
    made = result(serial=[100.0])
    metrics = made.runs[0].metrics | ({"p95_itl_ms": p95} if p95 else {})
    made.runs[0] = replace(made.runs[0], longest_gap=gap, metrics=metrics)
    assert [found.still for found in summary.outliers(made)] == ([still] if still else [])


def test_equal_texts_are_counted_over_the_repeats_that_both_arms_have() -> None:
    made = result(serial=[1.0, 1.0], folded=[1.0, 1.0, 1.0])
    made.runs = [replace(r, texts=("a", "b", "c" if r.arm == "serial" else "d")) for r in made.runs]
    assert summary.same_texts(made, "serial", "folded") == (4, 6)
    assert summary.same_texts(made, "serial", "slot") is None


def test_memory_is_the_worst_of_an_arms_servers() -> None:
    made = result(serial=[1.0])
    one = Server("serial", 1, {}, "serial", (), (), {}, 1.0, 10, 0, 100, "")
    made.servers = [one, replace(one, model_load_bytes=12, kv_blocks=90), replace(one, kv_blocks=None)]
    assert summary.memory(made, "serial") == (12, 90)
    assert summary.memory(made, "folded") == (None, None)
