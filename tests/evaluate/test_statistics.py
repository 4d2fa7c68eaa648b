"""Paired statistics: exact tests, intervals, and what a verdict may say."""

from __future__ import annotations

import math

import pytest

from foldmoe.evaluate import statistics
from foldmoe.evaluate.result import Sample, TaskResult
from foldmoe.evaluate.statistics import paired, score_interval, standard_error


def task(scores: list[float], *, texts: list[str] | None = None, prompts: str = "p") -> TaskResult:
    return TaskResult(
        tuple(
            Sample(i, f"{prompts}{i}", {"strict-match": score}, (texts or ["t"] * len(scores))[i])
            for i, score in enumerate(scores)
        ),
        token_limit=16,
    )


def pair(lost: int, won: int, n: int) -> statistics.Paired:
    """``n`` items, ``lost`` and ``won`` of which flipped."""
    before = [1.0] * lost + [0.0] * won + [1.0] * (n - lost - won)
    now = [0.0] * lost + [1.0] * won + [1.0] * (n - lost - won)
    return paired(task(now), task(before), "strict-match")


@pytest.fixture(autouse=True)
def _scipy() -> None:
    pytest.importorskip("scipy")


def test_p_is_mcnemars_exact() -> None:
    """10 lost and 2 won: twice the tail of twelve fair coins, 2 * (1 + 12 + 66) / 2^12."""
    found = pair(10, 2, 100)
    assert (found.lost, found.won, found.n) == (10, 2, 100)
    assert found.p == pytest.approx(2 * 79 / 4096)
    assert found.difference == pytest.approx(-0.08)
    assert pair(0, 0, 50).p == 1.0


def test_partial_credit_counts_which_way_an_item_moved() -> None:
    found = paired(task([0.25, 1.0, 0.5]), task([0.5, 0.75, 0.5]), "strict-match")
    assert (found.lost, found.won) == (1, 1)
    assert found.difference == pytest.approx(0.0)


def test_few_flips_get_exact_bounds() -> None:
    """No flip among 200: at 97.5 % each share is below 1 - 0.0125^(1/200)."""
    bound = 1 - 0.0125 ** (1 / 200)
    assert pair(0, 0, 200).interval == pytest.approx((-bound, bound))


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (1, 0), (5, 4), (0, 9)])
def test_exact_bounds_are_those_of_both_shares(lost: int, won: int) -> None:
    """Clopper and Pearson's bounds of a share are quantiles of beta distributions, here computed as such."""
    from scipy.stats import beta

    tail, n = 0.0125, 60
    low = [beta.ppf(tail, k, n - k + 1) if k else 0.0 for k in (lost, won)]
    high = [beta.ppf(1 - tail, k + 1, n - k) for k in (lost, won)]
    assert pair(lost, won, n).interval == pytest.approx((low[1] - high[0], high[1] - low[0]))


def test_items_that_lost_a_little_are_not_bounded_as_if_they_had_lost_all() -> None:
    """Nine items of 12 lose a hundredth each: the difference is -0.0075, and the interval must hold it."""
    found = paired(task([0.99] * 9 + [1.0] * 3), task([1.0] * 12), "strict-match")
    assert found.difference == pytest.approx(-0.0075)
    assert found.interval is not None
    assert found.interval[0] < found.difference < found.interval[1]


@pytest.mark.parametrize(("lost", "won"), [(30, 20), (12, 0), (0, 12), (200, 0)])
def test_many_flips_have_an_interval_around_the_difference(lost: int, won: int) -> None:
    found = pair(lost, won, 200)
    assert found.interval is not None
    low, high = found.interval
    assert low <= found.difference <= high
    assert low >= -1
    assert high <= 1


@pytest.mark.parametrize(
    ("lost", "won", "n", "verdict"),
    [
        (0, 0, 200, "equal within noise"),
        (0, 0, 40, "n too small to tell"),
        (3, 2, 40, "n too small to tell"),
        (40, 38, 1319, "equal within noise"),
        (30, 5, 200, "worse"),
        (5, 30, 200, "better"),
        (200, 0, 200, "worse"),
    ],
)
def test_verdicts(lost: int, won: int, n: int, verdict: str) -> None:
    assert pair(lost, won, n).verdict() == verdict


def test_the_comparisons_of_an_arm_share_the_level() -> None:
    found = pair(10, 2, 400)  # p = 0.039
    assert found.verdict(comparisons=1) == "worse"
    assert found.verdict(comparisons=4) != "worse"


def test_a_wider_margin_lets_fewer_items_tell() -> None:
    assert pair(0, 0, 40).verdict(margin=0.15) == "equal within noise"


def test_without_scipy_nothing_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statistics, "_scipy", lambda: None)
    found = pair(30, 5, 200)
    assert (found.p, found.interval) == (None, None)
    assert standard_error([1.0, 0.0]) is None
    assert found.verdict() == "not judged: needs scipy"
    assert score_interval([1.0, 0.0]) is None


def test_answers_to_other_prompts_are_not_paired() -> None:
    with pytest.raises(ValueError, match="item 0 is another prompt"):
        paired(task([1.0]), task([1.0], prompts="other"), "strict-match")
    with pytest.raises(ValueError, match="1 items against 2"):
        paired(task([1.0]), task([1.0, 1.0]), "strict-match")


def test_alike_counts_texts_not_scores() -> None:
    found = paired(task([1.0, 1.0], texts=["a", "b"]), task([1.0, 1.0], texts=["a", "c"]), "strict-match")
    assert (found.same, found.lost, found.won) == (1, 0, 0)


def test_standard_error_is_of_the_sample() -> None:
    assert standard_error([1.0, 0.0, 1.0, 0.0]) == pytest.approx(math.sqrt((4 * 0.25 / 3) / 4))
    assert standard_error([0.5, 0.25]) == pytest.approx(0.125)


@pytest.mark.filterwarnings("error")
def test_one_score_has_no_standard_error() -> None:
    assert standard_error([1.0]) is None
    assert standard_error([]) is None


def test_score_intervals_stay_inside_zero_and_one() -> None:
    low, high = score_interval([1.0] * 20) or (0.0, 0.0)
    assert 0.8 < low < high <= 1.0
    low, high = score_interval([0.25, 0.5, 0.75]) or (0.0, 0.0)
    assert low < 0.5 < high


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scores", [[0.5], [0.5, 0.5, 0.5]])
def test_partial_credit_without_spread_has_no_interval(scores: list[float]) -> None:
    assert score_interval(scores) is None
