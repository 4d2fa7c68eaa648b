"""A checkpoint's plan as a table: runs of identical layers collapse, every reason stays visible."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foldmoe.planner import CheckpointPlan, LayerPlan, StockLayer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from foldmoe.parallel.scheme import Dispatch

Row = LayerPlan | StockLayer


@dataclass(frozen=True)
class Run:
    """Neighbouring layers that are planned alike.

    Args:
        rows: their plans, in order.
    """

    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def label(self) -> str:
        return span(self.rows[0].layer, self.rows[-1].layer)

    @property
    def count(self) -> str:
        """``40 layers``, or ``39 of 40 layers`` where one of the label's numbers is not there."""
        found, count = _number(self.rows[0].layer, self.rows[-1].layer), len(self.rows)
        wide = count if found is None else int(found[2]) - int(found[1]) + 1
        return f"{count} of {wide} layers" if wide > count else f"{count} layers"

    @property
    def digest(self) -> str:
        """The layer's own, or one over the run."""
        if len(self.rows) == 1:
            return self.first.digest
        return hashlib.sha256(" ".join(row.digest for row in self.rows).encode()).hexdigest()[:12]

    def total(self, field: str) -> int:
        return sum(int(getattr(row, field)) for row in self.rows)


def span(first: str, last: str) -> str:
    """``layers.0..39.ffn`` for forty layers."""
    if first == last:
        return first
    found = _number(first, last)
    if found is None:
        return f"{first} .. {last}"
    head, low, high, tail = found
    return f"{head}{low}..{high}{tail}"


def _number(first: str, last: str) -> tuple[str, str, str, str] | None:
    """The one number in which two names differ, in both, between what stands before and after it."""
    one, other = (re.split(r"(\d+)", name) for name in (first, last))
    differing = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    if len(differing) != 1 or differing[0] % 2 == 0:  # not one number, which stands at an odd place
        return None
    at = differing[0]
    return "".join(one[:at]), one[at], other[at], "".join(one[at + 1 :])


def runs(rows: Sequence[Row]) -> list[Run]:
    """Collapse neighbours that differ in name alone."""
    return [Run(tuple(group)) for _, group in groupby(rows, key=_key)]


def _key(row: Row) -> tuple[object, ...]:
    reasons = tuple(reason.replace(row.layer, "{layer}") for reason in row.reasons)
    if isinstance(row, StockLayer):
        return ("stock", row.draft, row.opaque.nbytes, reasons)
    s = row.spec
    return (
        s.draft, s.hidden, s.top_k, s.routed, s.shared, s.activation, s.shared_activation, s.shared_gate, s.notes,
        row.strategy, row.arm, row.backend, row.activations, row.bytes_before, row.bytes_after, row.padded_width,
        row.requantize, row.fold_rows, row.tiles, reasons,
    )  # fmt: skip


def plan_table(plan: CheckpointPlan) -> RenderableType:
    """Table, notes and the summary line."""
    table = Table(title=f"{plan.source} on {plan.device.name}{_ranks(plan)}", title_justify="left", show_lines=True)
    table.add_column("layers", overflow="fold")
    table.add_column("stored", overflow="fold")
    table.add_column("how", overflow="fold")
    table.add_column("bytes a rank", justify="right", no_wrap=True)
    table.add_column("digest", no_wrap=True)
    remarks: list[Text] = []
    for run in runs(plan.rows):
        table.add_row(*_cells(run))
        first = run.first
        notes = () if isinstance(first, StockLayer) else (*first.spec.notes, *_tiles(first))
        remarks += [Text(f"{run.label}: {line}") for line in (*first.reasons, *notes)]
    lines = [Text(f"note: {note}") for note in plan.notes]
    total = Text(f"{plan.summary}   digest {plan.digest}", style="bold")
    return Group(table, *remarks, *lines, total) if plan.rows else Group(*lines, total)


def buffer_line(buffers: Mapping[Dispatch, int], tokens: int) -> str:
    """Bytes of exchange buffers by strategy, at ``tokens`` on every rank."""
    sizes = ", ".join(f"{name} {nbytes:,} B" for name, nbytes in buffers.items())
    return f"buffers a rank at {tokens:,} tokens, worst routing, shared by all layers: {sizes}"


def _tiles(plan: LayerPlan) -> tuple[str, ...]:
    return (f"tiles of {plan.backend}: {plan.tiles}",) if plan.tiles else ()


def _ranks(plan: CheckpointPlan) -> str:
    place = plan.placement
    sizes = [f"{kind} {size}" for kind, size in (("EP", place.ep_size), ("TP", place.tp_size)) if size > 1]
    return f", {' x '.join(sizes)}" if sizes else ""


def _cells(run: Run) -> tuple[str, ...]:
    """Layers, formats and widths, the decision, bytes before/after/extra, digest."""
    row, count = run.first, len(run.rows)
    draft = row.draft if isinstance(row, StockLayer) else row.spec.draft
    label = run.label + (f"\n{run.count}" if count > 1 else "") + ("\ndraft" if draft else "")
    if isinstance(row, StockLayer):
        return label, "not read", "stock", "", run.digest
    shared = "none" if row.spec.shared is None else str(row.spec.shared) + (" gated" if row.spec.shared_gate else "")
    how = [f"{row.strategy if row.folded else row.arm} on {row.backend}", f"activations {row.activations}"]
    if row.requantize:
        how.append("shared requantised")
    if row.padded_width is not None:
        how.append(f"padded to {row.padded_width}")
    before, after, extra = (run.total(field) for field in ("bytes_before", "bytes_after", "extra_bytes"))
    return (
        label,
        f"routed {row.spec.routed}\nshared {shared}",
        "\n".join(how),
        f"before {before:,}\nafter {after:,}\nextra {extra:+,}",
        run.digest,
    )
