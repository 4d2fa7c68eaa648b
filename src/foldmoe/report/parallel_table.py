"""Expert-parallel timings as a table: each way to run a layer, phase by phase, beside its bound and its estimate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foldmoe.report.by_tokens import by_tokens

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foldmoe.bench.parallel.result import ParallelResult, ParallelRow

HEADINGS = (
    "tokens", "transport", "fold", "dispatch", "local", "combine", "total", "low..high", "KB sent", "GB/s", "overlap",
    "x bound", "estimate", "bits",
)  # fmt: skip
TRUSTED = 0.25
"""An estimate further from the measurement is marked."""


def parallel_table(result: ParallelResult) -> RenderableType:
    """Microseconds; a section a number of tokens."""
    title = f"shape {result.request.shape} over {result.ranks} ranks, {result.backend}: one rank holds {result.spec}"
    return by_tokens(
        HEADINGS,
        result.rows,
        cells,
        left=("transport", "fold"),
        spare=("GB/s", "KB sent", "overlap", "low..high", "x bound", "bits", "estimate"),
        versions=result.versions,
        remarks=remarks(result),
        wrap=False,
        title=title,
        pad_edge=False,
    )


def remarks(result: ParallelResult) -> list[str]:
    """What columns mean, what they rest on, what did not run and why."""
    return [
        f"link in this run: {result.link / 1e9:,.1f} GB/s a direction ({result.link_how})",
        "us, slowest rank; x bound: total over the folded local layer and the unavoidable bytes at that link",
        f"estimate: of plan --estimate, ! if more than {TRUSTED:.0%} off; bits: equal to the all-gather's",
        *(["* called from the host: its counts are read there"] if any(not row.graph for row in result.rows) else []),
        *(f"not run: {name}: {reason}" for name, reason in result.refused.items()),
    ]


def cells(row: ParallelRow) -> tuple[str, ...]:
    """A row under :data:`HEADINGS`."""
    estimate = ""
    if row.predicted is not None:
        far = abs(row.predicted / row.total - 1) > TRUSTED
        estimate = f"{row.predicted * 1e6:,.0f}{' !' if far else ''}"
    return (
        f"{row.tokens:,}",
        row.transport + ("" if row.graph else "*"),
        "slot" if row.scheme == "slot" else f"{row.scheme} {row.arm}",
        *(f"{seconds * 1e6:,.1f}" for seconds in (row.dispatch, row.local, row.combine, row.total)),
        f"{row.low * 1e6:,.0f}..{row.high * 1e6:,.0f}",
        f"{row.sent / 1e3:,.0f}",
        f"{row.bandwidth / 1e9:,.1f}",
        f"{row.overlap:.0%}",
        "" if row.bound is None else f"{row.total / row.bound:.2f}",
        estimate,
        {None: "", True: "same", False: "differ"}[row.same_bits],
    )
