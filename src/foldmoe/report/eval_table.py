"""Accuracy by arm, for a terminal: layers first, then tasks, then what the numbers allow to say."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foldmoe.evaluate.statistics import judge, standard_error

if TYPE_CHECKING:
    from foldmoe.evaluate.result import ArmResult, EvalResult, TaskResult
    from foldmoe.evaluate.statistics import ArmVerdict, Paired, Verdict

_CELLS_SHOWN = 6
_COLORS = {"worse": "red", "better": "green", "equal within noise": "green"}


def eval_report(result: EvalResult) -> RenderableType:
    """All tables of a run, its verdicts and what it was made with."""
    verdicts = {verdict.arm: verdict for verdict in judge(result)}
    parts: list[RenderableType] = []
    if any(arm.layers for arm in result.arms):
        parts.append(_layers(result))
    parts += [_scores(result, task, verdicts) for task in result.arms[0].tasks]
    if result.arms[0].tasks:
        parts.append(_endings(result, verdicts))
    parts += [Text(line) for line in _weak_parts(result)]
    parts += [Text(f"note: {note}") for note in result.notes]
    for verdict in verdicts.values():
        found = verdict.overall
        line = f"{verdict.arm} against {result.baseline}: {found}"
        parts.append(Text(line, style=f"bold {_COLORS.get(found, '')}".strip()))
    parts.append(_made_with(result))
    return Group(*parts)


def _table(title: str, *left: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in left:
        table.add_column(heading, overflow="fold")
    return table


def _layers(result: EvalResult) -> Table:
    table = _table(f"{result.source}: relative error of the layers, bf16 in and out", "arm", "runs", "worst layer")
    for heading in ("against float64", "allowed", "against unfolded", "over"):
        table.add_column(heading, justify="right", overflow="fold")
    for arm in result.arms:
        worst = arm.worst_layer
        if worst is None:
            table.add_row(arm.arm, arm.resolved or "not said", "", "", "", "", "")
            continue
        table.add_row(
            arm.arm,
            arm.resolved or "not said",
            worst.layer,
            f"{max(layer.reference for layer in arm.layers):.1e}",
            f"{worst.allowed:.0e}",
            f"{max(layer.stored or 0.0 for layer in arm.layers):.1e}",
            f"{sum(bool(layer.problems) for layer in arm.layers)}/{len(arm.layers)}",
        )
    return table


def _scores(result: EvalResult, task: str, verdicts: dict[str, ArmVerdict]) -> Table:
    table = _table(f"{task}: scores, paired with {result.baseline}", "filter", "arm")
    for heading in ("score ± s.e.", "uncut", "lost, won", "p", "difference, 95 %"):
        table.add_column(heading, justify="right", overflow="fold")
    table.add_column("verdict", overflow="fold")
    for metric in result.arms[0].tasks[task].metrics:
        for arm in result.arms:
            verdict = verdicts.get(arm.arm)
            pair = verdict.pairs[task, metric] if verdict else None
            said = verdict.verdicts[task, metric] if verdict else None
            shown = metric if arm is result.arms[0] else ""
            table.add_row(shown, arm.arm, *_score_cells(arm.tasks[task], metric, pair, said))
        table.add_section()
    return table


def _score_cells(found: TaskResult, metric: str, pair: Paired | None, verdict: Verdict | None) -> list[str]:
    score, uncut = found.score(metric), found.score(metric, ended=True)
    cells = [
        "" if score is None else _score(score, found.scores(metric)),
        "none" if uncut is None else f"{uncut:.1%}",
    ]
    if pair is None:
        return [*cells, "", "", "", "baseline"]
    between = "" if pair.interval is None else f"{pair.interval[0]:+.1%} to {pair.interval[1]:+.1%}"
    return [*cells, f"{pair.lost}, {pair.won}", "" if pair.p is None else f"{pair.p:.2g}", between, str(verdict)]


def _score(mean: float, scores: list[float]) -> str:
    error = standard_error(scores)
    if error is None:
        return f"{mean:.1%}, one item" if len(scores) == 1 else f"{mean:.1%}"
    return f"{mean:.1%} ± {error:.1%}"


def _endings(result: EvalResult, verdicts: dict[str, ArmVerdict]) -> Table:
    table = _table("how answers end", "task", "arm")
    for heading in ("items", "shots", "token limit", "cut by it", "empty", "past end", "alike"):
        table.add_column(heading, justify="right", overflow="fold")
    for task in result.arms[0].tasks:
        for arm in result.arms:
            found, verdict = arm.tasks[task], verdicts.get(arm.arm)
            same = verdict.pairs[task, found.metrics[0]].same if verdict else None
            alike = "" if same is None else f"{same}/{len(found.samples)}"
            table.add_row(task if arm is result.arms[0] else "", arm.arm, *_ending_cells(found), alike)
        table.add_section()
    return table


def _ending_cells(found: TaskResult) -> list[str]:
    cells = [str(len(found.samples)), str(found.shots)]
    if not found.generates:
        return [*cells, "likelihoods", "", "", ""]
    cut = f"{found.cut:.1%}" if found.finish_known else f"at least {found.cut:.1%}"
    return [*cells, str(found.token_limit), cut, f"{found.empty:.1%}", f"{found.past_end:.1%}"]


def _weak_parts(result: EvalResult) -> list[str]:
    """The parts of a task, such as one length and depth, where an arm misses most."""
    lines = []
    for arm in result.arms:
        for task, found in arm.tasks.items():
            weak = _weak(found)
            if not weak:
                continue
            shown = ", ".join(f"{name} {score:.0%}" for name, score in weak[:_CELLS_SHOWN])
            more = f", and {len(weak) - _CELLS_SHOWN} more" if len(weak) > _CELLS_SHOWN else ""
            lines.append(f"{arm.arm}, {task}: under 100 % at {shown}{more}")
    return lines


def _weak(found: TaskResult) -> list[tuple[str, float]]:
    metric = next(iter(found.metrics), "")
    groups: dict[str, list[float]] = {}
    for sample in found.samples:
        if sample.group:
            groups.setdefault(sample.group, []).append(sample.scores[metric])
    scores = {name: sum(values) / len(values) for name, values in groups.items()}
    return sorted(((name, score) for name, score in scores.items() if score < 1), key=lambda pair: pair[1])


def _made_with(result: EvalResult) -> Text:
    served = [_served(arm) for arm in result.arms if arm.server]
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    lines = [
        "uncut: score of the answers that the token limit did not cut; past end: text follows the final answer; "
        f"alike: the same text as {result.baseline}'s",
        f"equal: within ±{result.request.margin:.1%} of the items; worse and better: p < 5 % over all rows of an arm",
        f"asked by {result.harness}, seed {result.request.seed}; {versions}",
        *served,
        result.request.command,
    ]
    return Text("\n".join(lines), style="dim")


def _served(arm: ArmResult) -> str:
    runs = arm.resolved or "what it runs was not read: give --state-dir"
    version = f", version {arm.server['version']}" if "version" in arm.server else ""
    return f"{arm.arm}: {arm.server['model']} at {arm.server['url']}{version}; {runs}"
