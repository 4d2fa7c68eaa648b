"""Serving A/B for a terminal: every arm with its spread, changes as engineers post them, and all that casts doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foldmoe.bench.serve import arms, summary

if TYPE_CHECKING:
    from foldmoe.bench.serve.results import Run, ServeResult
    from foldmoe.bench.serve.summary import Change, Spread
    from foldmoe.bench.serve.workloads import Workload

_FOLDING = ("folded", "slot")
_NOTABLE_HITS = 0.02


def serve_table(result: ServeResult) -> RenderableType:
    """One table a workload, one a pair of arms, one on the servers, then every remark."""
    measured = {run.arm for run in result.runs if not run.invalid}
    parts: list[RenderableType] = [_spreads(result, workload) for workload in result.workloads.workloads]
    parts += [
        _changes(result, before, after)
        for after in _FOLDING
        for before in result.arms
        if before not in _FOLDING and {before, after} <= measured
    ]
    parts.append(_servers(result))
    spaced = [piece for part in parts for piece in (part, "")]
    return Group(*spaced, *(Text(line) for line in remarks(result)))


def _spreads(result: ServeResult, workload: Workload) -> Table:
    title = f"in/out {workload.name}, {workload.num_prompts} requests: median (lowest..highest)"
    table = _table(title, "arm", *summary.METRICS.values(), "repeats")
    for arm in result.served:
        found = [summary.spread(result, arm, workload.name, metric) for metric in summary.METRICS]
        count = found[0].repeats if found[0] else 0
        table.add_row(arms.find(arm).label, *map(_spread, found), f"{count} of {result.repeats}")
    return table


def _spread(found: Spread | None) -> str:
    return f"{_number(found.median)} ({_number(found.low)}..{_number(found.high)})" if found else "none"


def _changes(result: ServeResult, before: str, after: str) -> Table:
    labels = [arms.find(name).label for name in (before, after)]
    table = _table(f"{labels[0]} -> {labels[1]}", "in/out, concurrency", *summary.METRICS.values())
    for workload in result.workloads.workloads:
        found = [summary.change(result, before, after, workload.name, metric) for metric in summary.METRICS]
        table.add_row(workload.name, *map(_change, found))
    return table


def _change(found: Change | None) -> str:
    if found is None:
        return "none"
    values = f"{_number(found.before.median)} -> {_number(found.after.median)}"
    later = "" if found.without_first is None else f", later {found.without_first:+.1%}"
    noise = "noise unknown" if found.noise is None else f"noise {found.noise:.1%}, {found.verdict}"
    return f"{values}\n{found.relative:+.1%}{later}\n{noise}"


def _servers(result: ServeResult) -> Table:
    reference = result.noise_of or result.arms[0]
    table = _table(
        "servers", "arm", "runs as", "start s", "weights GiB", "workspace MiB", "KV blocks",
        f"texts as {arms.find(reference).label}",
    )  # fmt: skip
    for arm in result.served:
        found = [server for server in result.servers if server.arm == arm]
        weights, blocks = summary.memory(result, arm)
        scratch = max((server.workspace_bytes or 0 for server in found), default=0)
        same = summary.same_texts(result, reference, arm) if arm != reference else None
        table.add_row(
            arms.find(arm).label,
            ", ".join(dict.fromkeys(server.runs_as for server in found)) or "never served",
            f"{max(server.start_seconds for server in found):.0f}" if found else "",
            "" if weights is None else f"{weights / 2**30:.3f}",
            f"{scratch / 2**20:.1f}" if found else "",
            "" if blocks is None else f"{blocks:,}",
            f"{same[0]}/{same[1]}" if same else "",
        )
    return table


def remarks(result: ServeResult) -> list[str]:
    """Lines for people: what failed, what does not count, what casts doubt on a number, what each arm decided."""
    lines = [f"failed: {arms.find(f.arm).label}, repeat {f.repeat}, {f.where}: {f.reason}" for f in result.failures]
    for run in filter(result.asks_for, result.runs):
        place = _place(run)
        lines += [f"invalid: {place}: {reason}" for reason in run.invalid]
        if (run.prefix_hits or 0.0) > _NOTABLE_HITS:
            lines.append(
                f"doubtful: {place}: the prefix cache answered {run.prefix_hits:.0%} of the prompt tokens; serve with "
                "--no-enable-prefix-caching"
            )
    for outlier in summary.outliers(result):
        run = outlier.run
        facts = [f"took {outlier.factor:.2f} times the others' median"] if outlier.factor else []
        facts += [f"request {outlier.slowest} stands out"] if outlier.slowest is not None else []
        facts += [f"no token came for {outlier.still:.1f} s"] if outlier.still is not None else []
        facts += [f"compiled {', '.join(run.compiled)}"] if run.compiled else []
        lines.append(f"outlier: {_place(run)}: {'; '.join(facts)}")
    for arm in result.served:
        said = [line for server in result.servers if server.arm == arm for line in (*server.decisions, *server.notes)]
        lines += [f"{arms.find(arm).label}: {line}" for line in dict.fromkeys(said)]
    if result.noise_arm is None:
        lines.append("noise floor: not measured, no arm was served twice")
    lines.append("changes: of the medians over all repeats; 'later' leaves the first repeat out")
    ran = "all workloads" if result.warm == "all" else "the largest workload alone"
    lines.append(f"warm-up: every server ran {ran} once, over other prompts, before anything was measured")
    served = dict.fromkeys(f"{name} {v}" for server in result.servers for name, v in server.versions.items())
    lines.append("server: " + (", ".join(served) or "none ran"))
    lines.append("client: " + ", ".join(f"{name} {version}" for name, version in result.versions.items()))
    return [*lines, f"again: {result.command}"]


def _place(run: Run) -> str:
    return f"{arms.find(run.arm).label}, repeat {run.repeat}, {run.workload}"


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="right" if number else "left", overflow="fold")
    return table


def _number(value: float) -> str:
    """Four digits that count."""
    return f"{value:,.{0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3}f}"
