"""Is the difference between two arms real? Paired statistics over the same items, from scipy.

An item is *lost* where the baseline scored higher and *won* where it scored lower. For right-or-wrong scores the exact
binomial test of lost against won is McNemar's exact test; for partial credit it is the sign test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from foldmoe.evaluate.request import MARGIN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.evaluate.result import ArmResult, EvalResult, TaskResult

Verdict = Literal["equal within noise", "worse", "better", "n too small to tell", "not judged: needs scipy"]

LEVEL = 0.05
"""Of the test, shared by all comparisons of one arm (Bonferroni)."""

_FEW = 10
"""With fewer flips than this a normal approximation does not hold and exact binomial bounds are used."""


def standard_error(scores: Sequence[float]) -> float | None:
    """Standard error of the mean, from the sample's spread; None for fewer than two scores, and without scipy."""
    stats = _scipy()
    return None if stats is None or len(scores) < 2 else float(stats.sem(scores))


def score_interval(scores: Sequence[float], confidence: float = 0.95) -> tuple[float, float] | None:
    """Interval of the mean: Wilson's for right-or-wrong scores, Student's for others, which needs two that differ.

    None where there is none, and without scipy.
    """
    stats = _scipy()
    if stats is None or not scores:
        return None
    if all(score in (0.0, 1.0) for score in scores):
        found = stats.binomtest(int(sum(scores)), len(scores)).proportion_ci(confidence, method="wilson")
        return float(found.low), float(found.high)
    return _student(stats, scores, confidence) if len(set(scores)) > 1 else None


@dataclass(frozen=True)
class Paired:
    """One metric of one task, an arm against the baseline.

    Args:
        same: answers alike to the character; None where the task has none.
        p: two-sided exact test of lost against won; None without scipy.
        interval: 95 % bounds of the difference of means; None without scipy.
    """

    n: int
    lost: int
    won: int
    difference: float
    same: int | None
    p: float | None
    interval: tuple[float, float] | None

    def verdict(self, *, margin: float = MARGIN, comparisons: int = 1) -> Verdict:
        """What the numbers allow to say.

        Args:
            margin: differences within it count as equal.
            comparisons: made for this arm; they share :data:`LEVEL`.
        """
        if self.p is None or self.interval is None:
            return "not judged: needs scipy"
        if self.p < LEVEL / comparisons:
            return "worse" if self.lost > self.won else "better"
        within = -margin <= self.interval[0] and self.interval[1] <= margin
        return "equal within noise" if within else "n too small to tell"


def paired(mine: TaskResult, baseline: TaskResult, metric: str) -> Paired:
    """Compare two arms' answers to the same items.

    Raises:
        ValueError: the items differ, so nothing can be paired.
    """
    asked = [[(s.id, s.prompt_hash) for s in task.samples] for task in (mine, baseline)]
    if asked[0] != asked[1]:
        first = next((a for a, b in zip(*asked, strict=False) if a != b), None)
        where = f"item {first[0]} is another prompt" if first else f"{len(asked[0])} items against {len(asked[1])}"
        raise ValueError(f"the arms were not asked the same: {where}; check the chat template and the few-shot seed")
    differences = [m - b for m, b in zip(mine.scores(metric), baseline.scores(metric), strict=True)]
    lost, won = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    same = sum(m.text == b.text for m, b in zip(mine.samples, baseline.samples, strict=True))
    stats = _scipy()
    return Paired(
        n=len(differences),
        lost=lost,
        won=won,
        difference=sum(differences) / len(differences),
        same=same if mine.generates else None,
        p=None if stats is None else float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0,
        interval=None if stats is None else _difference_interval(stats, differences, lost, won),
    )


@dataclass(frozen=True)
class ArmVerdict:
    """One arm against the baseline over all tasks and metrics.

    Args:
        pairs: by (task, metric).
        verdicts: the same.
        overall: the worst of them.
    """

    arm: str
    pairs: dict[tuple[str, str], Paired]
    verdicts: dict[tuple[str, str], Verdict]
    overall: Verdict


_SEVERITY: tuple[Verdict, ...] = (
    "worse", "not judged: needs scipy", "n too small to tell", "better", "equal within noise"
)  # fmt: skip


def judge(result: EvalResult) -> list[ArmVerdict]:
    """Every arm but the baseline, in the order of the run; none where no item has a score."""
    baseline = result.arm(result.baseline)
    others = [arm for arm in result.arms if arm is not baseline and any(task.metrics for task in arm.tasks.values())]
    return [_judge(arm, baseline, result.request.margin) for arm in others]


def _judge(arm: ArmResult, baseline: ArmResult, margin: float) -> ArmVerdict:
    pairs = {
        (task, metric): paired(mine, baseline.tasks[task], metric)
        for task, mine in arm.tasks.items()
        for metric in mine.metrics
    }
    verdicts = {key: pair.verdict(margin=margin, comparisons=len(pairs)) for key, pair in pairs.items()}
    return ArmVerdict(arm.arm, pairs, verdicts, min(verdicts.values(), key=_SEVERITY.index))


def _difference_interval(stats: Any, differences: Sequence[float], lost: int, won: int) -> tuple[float, float]:
    if lost + won >= _FEW and len(set(differences)) > 1:
        low, high = _student(stats, differences, 0.95)
        return max(low, -1.0), min(high, 1.0)
    # scipy has no interval of the difference of two paired shares. It bounds the share of lost items and that of won
    # ones; both bounds at 97.5 % hold together at 95 % (Bonferroni), and the difference is won less lost.
    lose, win = (stats.binomtest(flips, len(differences)).proportion_ci(0.975, method="exact") for flips in (lost, won))
    if all(difference in (-1.0, 0.0, 1.0) for difference in differences):
        return float(win.low - lose.high), float(win.high - lose.low)
    # With partial credit an item moves by any part of one, so that only the far ends hold.
    return float(-lose.high), float(win.high)


def _student(stats: Any, values: Sequence[float], confidence: float) -> tuple[float, float]:
    found = stats.ttest_1samp(values, 0.0).confidence_interval(confidence)
    return float(found.low), float(found.high)


def _scipy() -> Any:
    try:
        from scipy import stats
    except ImportError:
        return None
    return stats
