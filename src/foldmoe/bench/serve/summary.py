"""What the runs say together: medians, changes against a baseline, the noise floor, outliers, equal texts.

Only valid runs count. The noise floor of a metric is one arm against itself: the medians of the arm and of the same arm
served once more, interleaved like any other. A change is real where it exceeds that floor and the two arms' ranges over
all repeats do not overlap. Fewer than three repeats give no verdict: with one, ranges are points and the floor is a
single draw, so that every second pair of arms that are alike would differ.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from foldmoe.bench.serve.results import Run, ServeResult

Verdict = Literal["better", "worse", "tie", "noise floor not measured", "too few repeats"]

THROUGHPUT = "output_throughput"
METRICS = {
    THROUGHPUT: "output tok/s",
    "mean_tpot_ms": "mean TPOT ms",
    "mean_ttft_ms": "mean TTFT ms",
    "median_itl_ms": "median ITL ms",
}
"""The client's names of the metrics that engineers post, and the headings that they post them under."""

_FEWEST_REPEATS = 3
_SLOW_RUN = 1.1
_SLOW_REQUEST = 2.0
_STILL_SECONDS, _STILL_FACTOR = 2.0, 10.0
"""A gap between two tokens that no step explains: longer than this, and than so many times nearly all gaps."""


@dataclass(frozen=True)
class Spread:
    """One metric of one arm over its repeats.

    Args:
        median, low, high: over all valid repeats.
        without_first: median over all but the first repeat, which may have met cold caches; None if none is left.
        repeats: how many count.
    """

    median: float
    low: float
    high: float
    without_first: float | None
    repeats: int


@dataclass(frozen=True)
class Change:
    """One metric of one arm against another's.

    Args:
        before, after: spreads of the two arms.
        relative: change of the medians; +0.1 is 10 % more.
        without_first: likewise without the first repeat of either.
        noise: relative, the noise floor; None where it was not measured.
        verdict: from the metric's point of view: more throughput is better, more milliseconds are worse.
    """

    before: Spread
    after: Spread
    relative: float
    without_first: float | None
    noise: float | None
    verdict: Verdict


@dataclass(frozen=True)
class Outlier:
    """A run that took far longer than the same arm's others, that compiled kernels, or whose server stood still.

    Args:
        run: the run.
        factor: its time over the median of the others'; None where there are none.
        slowest: index of the request that lost most, None where no request stands out.
        still: seconds for which no token came, where no step takes as long; None where there was no such gap.
    """

    run: Run
    factor: float | None
    slowest: int | None
    still: float | None = None


def valid(result: ServeResult, arm: str, workload: str) -> list[Run]:
    """Runs that count, by repeat."""
    runs = [run for run in _counted(result) if run.arm == arm and run.workload == workload]
    return sorted(runs, key=lambda run: run.repeat)


def _counted(result: ServeResult) -> list[Run]:
    """Valid runs that are asked for."""
    return [run for run in result.runs if not run.invalid and result.asks_for(run)]


def spread(result: ServeResult, arm: str, workload: str, metric: str) -> Spread | None:
    """None where no valid run has the metric."""
    values = {r.repeat: r.metrics[metric] for r in valid(result, arm, workload) if metric in r.metrics}
    if not values:
        return None
    later = [value for repeat, value in values.items() if repeat > 1]
    every = values.values()
    without_first = statistics.median(later) if later else None
    return Spread(statistics.median(every), min(every), max(every), without_first, len(values))


def noise(result: ServeResult, workload: str, metric: str) -> float | None:
    """An arm against itself, relative; None where it was not served twice."""
    pair = _twice(result, workload, metric)
    return abs(pair[1].median / pair[0].median - 1) if pair else None


def _twice(result: ServeResult, workload: str, metric: str) -> tuple[Spread, Spread] | None:
    """The arm that was served twice, both times."""
    if result.noise_arm is None or result.noise_of is None:
        return None
    one, two = (spread(result, arm, workload, metric) for arm in (result.noise_of, result.noise_arm))
    return (one, two) if one and two else None


def change(result: ServeResult, before: str, after: str, workload: str, metric: str) -> Change | None:
    """Arm ``after`` against arm ``before``; None where one of them has no valid run."""
    one, two = (spread(result, arm, workload, metric) for arm in (before, after))
    if one is None or two is None or not one.median:
        return None
    relative, floor = two.median / one.median - 1, noise(result, workload, metric)
    pairs = (one.without_first, two.without_first)
    without_first = pairs[1] / pairs[0] - 1 if pairs[0] and pairs[1] else None
    verdict: Verdict
    if floor is None:
        verdict = "noise floor not measured"
    elif min(found.repeats for found in (one, two, *(_twice(result, workload, metric) or ()))) < _FEWEST_REPEATS:
        verdict = "too few repeats"
    elif abs(relative) <= floor or (one.low <= two.high and two.low <= one.high):
        verdict = "tie"
    else:
        verdict = "better" if (relative > 0) == metric.endswith("_throughput") else "worse"
    return Change(one, two, relative, without_first, floor, verdict)


def outliers(result: ServeResult) -> list[Outlier]:
    """Runs that compiled kernels while they were measured, took 10 % longer than the arm's others, or stood still.

    A server that compiles without a word stands still, which shows in a single repeat too.
    """
    found = []
    for run in _counted(result):
        others = [other for other in valid(result, run.arm, run.workload) if other.repeat != run.repeat]
        factor = run.seconds / statistics.median(o.seconds for o in others) if others else None
        still = _still(run)
        if run.compiled or still is not None or (factor is not None and factor > _SLOW_RUN):
            found.append(Outlier(run, factor, _slowest(run, others), still))
    return found


def _still(run: Run) -> float | None:
    usual = run.metrics.get("p95_itl_ms", 0.0) / 1e3
    gap = run.longest_gap or 0.0
    return gap if gap > max(_STILL_SECONDS, _STILL_FACTOR * usual) else None


def _slowest(run: Run, others: list[Run]) -> int | None:
    """The request that took longest beyond the same request's median in other repeats, if it took twice as long."""
    comparable = [other.latencies for other in others if len(other.latencies) == len(run.latencies)]
    if not comparable or not run.latencies:
        return None
    usual = [statistics.median(times) for times in zip(*comparable, strict=True)]
    index = max(range(len(usual)), key=lambda i: run.latencies[i] - usual[i])
    return index if run.latencies[index] > _SLOW_REQUEST * usual[index] else None


def same_texts(result: ServeResult, before: str, after: str) -> tuple[int, int] | None:
    """Answers of ``after`` that equal ``before``'s to the same prompts, and how many both gave; None without any.

    Whole texts are compared, so that answers which agree up to a point and then run apart count as different.
    """
    texts = {(r.arm, r.repeat, r.workload): r.texts for r in _counted(result)}
    pairs = [
        (texts[before, repeat, workload], found)
        for (arm, repeat, workload), found in texts.items()
        if arm == after and (before, repeat, workload) in texts
    ]
    counted = [(one, two) for pair in pairs for one, two in zip(*pair, strict=True)]
    return (sum(one == two for one, two in counted), len(counted)) if counted else None


def memory(result: ServeResult, arm: str) -> tuple[int | None, int | None]:
    """Bytes that loading took on a rank and blocks of its KV cache: the worst over the arm's servers."""
    servers = [server for server in result.servers if server.arm == arm]
    return (
        max(_known(server.model_load_bytes for server in servers), default=None),
        min(_known(server.kv_blocks for server in servers), default=None),
    )


def _known(numbers: Iterable[int | None]) -> list[int]:
    return [number for number in numbers if number is not None]
