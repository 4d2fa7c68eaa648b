"""A result of ``foldmoe eval`` as a section: scores with intervals, paired differences, shares of broken answers."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

from foldmoe.evaluate.statistics import judge, score_interval
from foldmoe.report.page.blocks import Charts, Notes, Section, Source, Table
from foldmoe.report.page.charts import Dots, Point, Series

if TYPE_CHECKING:
    from foldmoe.evaluate.result import ArmResult, EvalResult, TaskResult
    from foldmoe.evaluate.statistics import ArmVerdict


def accuracy_section(result: EvalResult, path: str) -> Section:
    """Every arm's row stands beside the baseline's, whichever way it went."""
    verdicts = judge(result)
    lead = [f"{found.arm} against {result.baseline}: {found.overall}." for found in verdicts]
    chart = _chart(result)
    tables = [_scores(result, verdicts), *_groups(result), *_layers(result.arms)]
    resolved = tuple(f"{arm.arm} ran as: {arm.resolved or 'does not say'}" for arm in result.arms)
    return Section(
        f"Accuracy: {result.source}",
        (f"Asked by {result.harness}.", *lead),
        (
            *((Charts((chart,)),) if chart else ()),
            *tables,
            Notes("What ran, and what to know", (*resolved, *_protocol(result.arms[0]), *result.notes)),
            Source(path, result.request.command, result.versions),
        ),
    )


def _rows(result: EvalResult) -> list[tuple[str, str]]:
    """Every task with every metric of it."""
    return [(name, metric) for name, task in result.arms[0].tasks.items() for metric in task.metrics]


def _chart(result: EvalResult) -> Dots | None:
    rows = _rows(result)
    series = []
    for arm in result.arms:
        points = []
        for row, (task, metric) in enumerate(rows):
            scores = arm.tasks[task].scores(metric) if task in arm.tasks else []
            if scores:
                bounds = score_interval(scores) or (None, None)
                points.append(
                    Point(row, 100 * sum(scores) / len(scores), *(None if b is None else 100 * b for b in bounds))
                )
        if drawn := tuple(point for point in points if point.finite):
            series.append(Series(arm.arm, drawn))
    if not series:
        return None
    names = tuple(f"{task}, {metric}" for task, metric in rows)
    spoken = (f"{s.name}: " + ", ".join(f"{p.y:.1f} % in {names[int(p.x)]}" for p in s.points) for s in series)
    return Dots(
        "Scores by task", f"Percent of items. {'; '.join(spoken)}.", "score, %, with its 95 % interval", names,
        tuple(series),
    )  # fmt: skip


def _scores(result: EvalResult, verdicts: list[ArmVerdict]) -> Table:
    headings = (
        "task, metric", "arm", "score", "95 % interval", "items", "difference", "its 95 % interval", "lost, won", "p",
        "same answers", "cut", "empty", "past end", "verdict",
    )  # fmt: skip
    judged = {found.arm: found for found in verdicts}
    rows: list[tuple[str, ...]] = []
    marks = {}
    for task, metric in _rows(result):
        for arm in result.arms:
            if task not in arm.tasks or metric not in arm.tasks[task].metrics:
                continue
            cells = _versus(judged.get(arm.arm), task, metric)
            marks[len(rows)] = {"worse": "bad", "better": "best"}.get(cells[-1], "")
            found = arm.tasks[task]
            scores = found.scores(metric)
            rows.append(
                (f"{task}, {metric}", arm.arm, f"{found.score(metric) or 0:.2%}", _interval(score_interval(scores)),
                 f"{len(scores):,}", *cells[:-1], *_broken(found), cells[-1])
            )  # fmt: skip
    caption = f"Scores, and paired differences against {result.baseline} over the same items"
    return Table(caption, headings, tuple(rows), frozenset(("task, metric", "arm", "verdict")), marks)


def _versus(found: ArmVerdict | None, task: str, metric: str) -> tuple[str, ...]:
    """Difference, interval, flips, p, same answers, verdict."""
    if found is None:
        return "", "", "", "", "", "baseline"
    pair = found.pairs.get((task, metric))
    if pair is None:
        return "", "", "", "", "", "not paired"
    return (
        f"{pair.difference:+.2%}",
        _interval(pair.interval, "+"),
        f"{pair.lost}, {pair.won}",
        "" if pair.p is None else f"{pair.p:.2g}",
        "" if pair.same is None else f"{pair.same} of {pair.n}",
        found.verdicts[task, metric],
    )


def _interval(bounds: tuple[float, float] | None, sign: str = "") -> str:
    return "none" if bounds is None else f"{bounds[0]:{sign}.2%}..{bounds[1]:{sign}.2%}"


def _broken(task: TaskResult) -> tuple[str, str, str]:
    """Answers cut by the limit, without text, and going on past their end; nothing for likelihoods."""
    if not task.generates:
        return "", "", ""
    least = "" if task.finish_known else "at least "
    return f"{least}{task.cut:.1%}", f"{task.empty:.1%}", f"{task.past_end:.1%}"


def _groups(result: EvalResult) -> list[Table]:
    """Parts of a task, such as lengths and depths of a haystack, where it has any."""
    rows = []
    for task, metric in _rows(result):
        for arm in result.arms:
            samples = sorted(arm.tasks[task].samples if task in arm.tasks else (), key=lambda sample: sample.group)
            for name, group in groupby((s for s in samples if s.group), key=lambda sample: sample.group):
                scores = [sample.scores[metric] for sample in group]
                bounds = score_interval(scores)
                rows.append(
                    (f"{task}, {metric}", name, arm.arm, f"{sum(scores) / len(scores):.1%}", _interval(bounds),
                     f"{len(scores):,}")
                )  # fmt: skip
    headings = ("task, metric", "part", "arm", "score", "95 % interval", "items")
    rows.sort(key=lambda row: row[:2])
    return [Table("Scores by part of a task", headings, tuple(rows), frozenset(headings[:3]))] if rows else []


def _layers(arms: tuple[ArmResult, ...]) -> list[Table]:
    """The error of a layer, before any question is asked: small faults hide in scores."""
    rows: list[tuple[str, ...]] = []
    marks = {}
    for arm in (arm for arm in arms if arm.layers):
        worst = max(arm.layers, key=lambda layer: layer.reference)
        stored = [layer.stored for layer in arm.layers if layer.stored is not None]
        over = sum(not layer.reference <= layer.allowed or bool(layer.problems) for layer in arm.layers)
        marks[len(rows)] = "bad" if over else ""
        rows.append(
            (arm.arm, ", ".join(dict.fromkeys(layer.how for layer in arm.layers)), f"{len(arm.layers)}",
             f"{worst.reference:.1e}", worst.layer, f"{worst.allowed:.1e}", f"{over}",
             f"{max(stored):.1e}" if stored else "")
        )  # fmt: skip
    headings = (
        "arm", "how", "layers", "largest error against the float64 reference", "layer", "allowed", "over it",
        "largest error against the layer as stored",
    )  # fmt: skip
    table = Table("Errors of the layers on random input", headings, tuple(rows), frozenset(("arm", "how", "layer")),
                  marks)  # fmt: skip
    return [table] if rows else []


def _protocol(arm: ArmResult) -> list[str]:
    lines = []
    for task_name, task in arm.tasks.items():
        limit = "" if task.token_limit is None else f", at most {task.token_limit} new tokens"
        settings = "".join(f", {name} {value}" for name, value in task.generation.items())
        version = f" version {task.version}" if task.version else ""
        lines.append(f"{task_name}{version}: {task.shots} examples before the question{limit}{settings}")
    return lines
