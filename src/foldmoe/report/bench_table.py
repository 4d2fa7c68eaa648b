"""Layer timings as a table: losing rows included, ties marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foldmoe.bench.compare import FEWEST_ROUNDS
from foldmoe.report.by_tokens import by_tokens

if TYPE_CHECKING:
    from rich.console import RenderableType

    from foldmoe.bench.result import LayerResult, Row

HEADINGS = ("tokens", "arm", "us", "low..high", "noise", "GB/s", "TFLOP/s", "x floor", "vs peer", "error")


def bench_table(result: LayerResult) -> RenderableType:
    """One row an arm and number of tokens; a section a number of tokens."""
    return by_tokens(
        HEADINGS,
        result.rows,
        lambda row: cells(row, result),
        left=("arm",),
        spare=("TFLOP/s", "GB/s", "low..high", "x floor", "error"),
        versions=result.versions,
        remarks=remarks(result),
        title=f"shape {result.shape}: {result.what} ({result.spec})",
    )


def remarks(result: LayerResult) -> list[str]:
    """What floors are made of, what errors mean, what did not run and why."""
    found = result.ceilings
    own = any(row.gigabytes_per_second * 1e9 >= found.read_bandwidth for row in result.rows)
    return [
        f"ceilings in this run: {found.read_bandwidth / 1e9:,.0f} GB/s read{' (by an arm)' if own else ''}, "
        f"{found.matmul / 1e12:,.2f} TFLOP/s {found.matmul_dtype}",
        *(f"{arm}: {_memory(found)}" for arm, found in result.memory.items()),
        *(["errors of peers: against the float64 oracle on unquantised activations"] if result.request.peers else []),
        *(f"not run: {arm}: {reason}" for arm, reason in result.refused.items()),
    ]


def _memory(found: dict[str, int]) -> str:
    weights, workspace = (found[name] / 1e6 for name in ("weights", "workspace"))
    return f"{weights:,.1f} MB of packed weights, {workspace:,.1f} MB of workspace shared by all layers on a stream"


def cells(row: Row, result: LayerResult) -> tuple[str, ...]:
    """One of the result's rows under :data:`HEADINGS`."""
    versus = "" if row.against is None else f"{row.against:.3f}"
    if row.against is not None and 0 < abs(row.against - 1) <= row.noise + _peer_noise(row, result):
        versus += " tie"
    return (
        f"{row.tokens:,}",
        row.arm,
        f"{row.seconds * 1e6:,.1f}",
        f"{row.low * 1e6:,.1f}..{row.high * 1e6:,.1f}",
        f"{row.noise:.1%}" if result.request.rounds >= FEWEST_ROUNDS else "",
        f"{row.gigabytes_per_second:,.0f}",
        f"{row.teraflops:,.2f}",
        f"{row.seconds / row.floor:.2f}",
        versus,
        "not checked" if row.error is None else f"{row.error:.1e}",
    )


def _peer_noise(row: Row, result: LayerResult) -> float:
    """Of the arm that ``row`` stands against: the best that is not ours, whose ratio to itself is 1."""
    peers = (other.noise for other in result.rows if other.tokens == row.tokens and other.against == 1)
    return next(peers, 0.0)
