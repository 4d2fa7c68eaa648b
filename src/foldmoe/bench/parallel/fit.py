"""``python -m foldmoe.bench.parallel.fit RESULT...``: results as the cost model's constants and the docs' tables."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foldmoe.bench.parallel.layers import policy, whole
from foldmoe.bench.parallel.result import TRANSPORTS, ParallelResult
from foldmoe.moe import Placement
from foldmoe.parallel import Scheme
from foldmoe.parallel.estimate import phases
from foldmoe.parallel.exchange_times import Cost, Exchange
from foldmoe.parallel.kernel_times import Floor
from foldmoe.parallel.links import find_link
from foldmoe.planner import plan_layer
from foldmoe.planner.devices import KNOWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from foldmoe.bench.parallel.result import ParallelRow
    from foldmoe.parallel.estimate import Phases
    from foldmoe.planner.plan import Strategy

DEVICE = "h200"
"""What the results are taken to come from."""

Fold = tuple[str, str]

STRATEGIES: dict[Fold, Strategy] = {
    ("native", "folded"): "native",
    ("native", "dual-stream"): "serial",
    ("slot", "folded"): "slot",
}
"""What a plan calls a row's scheme and arm."""


def expected(result: ParallelResult, row: ParallelRow) -> Phases:
    """What the cost model says of one row."""
    request, device = result.request, KNOWN[DEVICE]
    asked = policy(request, row.scheme, row.arm, device)
    plan = plan_layer(whole(request, result.ranks), asked, device, Placement(result.ranks, 0))
    scheme = Scheme.of(plan, max(request.tokens), dispatch=TRANSPORTS[row.transport])  # type: ignore[arg-type]
    floor = Floor.of(device, fp8=plan.activations != "bf16")
    return phases(plan, scheme, row.tokens, find_link("nvlink", device), floor)


def fit(points: Sequence[tuple[float, float]], bandwidth: float) -> Cost:
    """Least squares of the relative error.

    Args:
        points: bytes and seconds.
        bandwidth: of the link, whose share is taken off first.
    """
    weight = torch.tensor([1 / seconds for _, seconds in points], dtype=torch.float64)
    nbytes = torch.tensor([moved for moved, _ in points], dtype=torch.float64)
    rest = torch.tensor([seconds - moved / bandwidth for moved, seconds in points], dtype=torch.float64)
    unit = nbytes.max().clamp_min(1)  # columns of one size
    columns = torch.stack((torch.ones_like(nbytes), nbytes / unit), 1) * weight[:, None]
    fixed, slope = torch.linalg.lstsq(columns, (rest * weight)[:, None]).solution.flatten().tolist()
    if slope < 0:
        fixed, slope = float((rest * weight**2).sum() / (weight**2).sum()), 0.0
    return Cost(fixed, slope / float(unit))


def paced_by_the_host(exchange: Exchange, rows: Sequence[tuple[Phases, ParallelRow]], bandwidth: float) -> Exchange:
    """``exchange`` with the ``together`` and ``busy`` whose largest relative error over the folded native rows is
    smallest, then the ``apart`` and ``slot`` that are best for the others.

    They are looked for up to 2 ms in steps of 5 us, ``busy`` up to 1 ms in steps of 20: far finer than such a host's
    times repeat.

    Args:
        exchange: whose phases stand.
        rows: of one transport, each beside what the model says of it. Without rows of a fold its constant is 0.
        bandwidth: of the link, bytes a second.
    """

    def best(candidates: Iterable[Exchange], fold: Fold) -> Exchange:
        ours = [(model, row) for model, row in rows if (row.scheme, row.arm) == fold]
        moved = [
            exchange.dispatch.seconds(model.dispatch_bytes, bandwidth)
            + model.local
            + exchange.combine.seconds(model.combine_bytes, bandwidth)
            for model, _ in ours
        ]

        def largest_error(candidate: Exchange) -> float:
            totals = [
                taken + candidate.beyond(model.local, STRATEGIES[fold])
                for taken, (model, _) in zip(moved, ours, strict=True)
            ]
            return max((abs(total / row.total - 1) for total, (_, row) in zip(totals, ours, strict=True)), default=0.0)

        return min(candidates, key=largest_error)

    steps = [step * 5e-6 for step in range(401)]
    grid = (replace(exchange, together=t, busy=b * 20e-6) for t in steps for b in range(51))
    found = best(grid, ("native", "folded"))
    found = best([replace(found, apart=more) for more in steps], ("native", "dual-stream"))
    return best([replace(found, slot=more) for more in steps], ("slot", "folded"))


def main(paths: Sequence[str]) -> None:
    """Print constants, then the rows of each result beside what the model says now."""
    results = [ParallelResult.load(path) for path in paths]
    every = [(expected(result, row), row) for result in results for row in result.rows]
    bandwidth = find_link("nvlink", KNOWN[DEVICE]).bandwidth
    for transport, strategy in TRANSPORTS.items():
        ours = [(model, row) for model, row in every if row.transport == transport]
        rows = [(model, row) for model, row in ours if (row.scheme, row.arm) == ("native", "folded")]
        if rows:
            there = fit([(model.dispatch_bytes, row.dispatch) for model, row in rows], bandwidth)
            back = fit([(model.combine_bytes, row.combine) for model, row in rows], bandwidth)
            exchange = Exchange(there, back, max(0.0, _beyond([row for _, row in rows])))
            if strategy == "all_to_all":
                exchange = paced_by_the_host(exchange, ours, bandwidth)
            host = exchange.busy, exchange.apart, exchange.slot
            rest = "".join(f", {seconds * 1e6:.1f}e-6" for seconds in host) if any(host) else ""
            print(f'    "{strategy}": Exchange({_code(there)}, {_code(back)}, {exchange.together * 1e6:.1f}e-6{rest}),')
    for result in results:
        print(f"\nShape {result.request.shape}, {result.link / 1e9:.0f} GB/s\n\n{_table(result)}\n\n{_totals(result)}")


def _table(result: ParallelResult) -> str:
    """The folded native rows, phase by phase, and what the model says now."""
    heads = ("tokens", "transport", "dispatch", "local", "combine", "total", "x bound", "overlap", "GB/s", "estimate")
    lines = [heads, ("---",) * len(heads)]
    for row in _sorted(result):
        if (row.scheme, row.arm) == ("native", "folded"):
            times = (_us(part) for part in (row.dispatch, row.local, row.combine, row.total))
            bound = "" if row.bound is None else f"{row.total / row.bound:.2f}"
            shares = (bound, f"{row.overlap:.0%}", f"{row.bandwidth / 1e9:.1f}")
            lines.append((f"{row.tokens}", row.transport, *times, *shares, _us(expected(result, row).total)))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _totals(result: ParallelResult) -> str:
    """All ways to run the layer, as totals."""
    folds = sorted({(row.scheme, row.arm) for row in result.rows})
    heads = ("tokens", "transport", *(arm if scheme == "native" else scheme for scheme, arm in folds))
    lines = [heads, ("---",) * len(heads)]
    totals = {(row.tokens, row.transport, row.scheme, row.arm): _us(row.total) for row in result.rows}
    for tokens, transport in dict.fromkeys((row.tokens, row.transport) for row in _sorted(result)):
        found = (totals.get((tokens, transport, *fold), "") for fold in folds)
        lines.append((f"{tokens}", transport, *found))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _sorted(result: ParallelResult) -> list[ParallelRow]:
    """By tokens; a run may have had another order, the most wanted first."""
    return sorted(result.rows, key=lambda row: row.tokens)


def _beyond(rows: Sequence[ParallelRow]) -> float:
    """Seconds of the whole beyond its phases: least squares of the relative error."""
    weights = [1 / row.total**2 for row in rows]
    beyond = [row.total - row.dispatch - row.local - row.combine for row in rows]
    return sum(w * more for w, more in zip(weights, beyond, strict=True)) / sum(weights)


def _code(cost: Cost) -> str:
    return f"Cost({cost.fixed * 1e6:.1f}e-6, {cost.per_byte * 1e12:.1f}e-12)"


def _us(seconds: float) -> str:
    """Microseconds."""
    return f"{seconds * 1e6:,.0f}" if seconds >= 99.95e-6 else f"{seconds * 1e6:.1f}"


if __name__ == "__main__":
    parser = ArgumentParser(prog="python -m foldmoe.bench.parallel.fit", description=__doc__.partition(": ")[2])
    parser.add_argument("results", nargs="+", metavar="RESULT", help="what foldmoe bench parallel --out wrote")
    main(parser.parse_args().results)
