"""A plan file, as ``foldmoe plan --json`` writes it, as a section: layer, rank, decision, reason."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from foldmoe import result_file
from foldmoe.report.page.blocks import Notes, Section, Source, Table
from foldmoe.report.plan_table import span

if TYPE_CHECKING:
    from pathlib import Path

KIND = "plan"


@dataclass(frozen=True)
class PlanRow:
    """One layer's decision; :meth:`foldmoe.LayerPlan.as_dict` says what each field is.

    A layer that the engine keeps has no facts, so that these have defaults.
    """

    layer: str
    strategy: str
    arm: str
    backend: str
    digest: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    draft: bool = False
    activations: str = ""
    routed: str = "not read"
    shared: str = ""
    requantize: bool = False
    padded_width: int | None = None
    bytes_after: int = 0
    extra_bytes: int = 0
    experts_by_rank: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for layers that differ in name alone."""
        reasons = tuple(reason.replace(self.layer, "") for reason in (*self.reasons, *self.notes))
        return (
            self.strategy, self.arm, self.backend, self.draft, self.activations, self.routed, self.shared,
            self.requantize, self.padded_width, self.bytes_after, self.extra_bytes, self.experts_by_rank, reasons,
        )  # fmt: skip

    @property
    def how(self) -> str:
        """The decision in words."""
        if self.arm == "stock":
            return "unfolded: the engine's own layer"
        decision = f"folded, {self.strategy}" if self.arm == "folded" else f"unfolded, {self.arm}"
        extras = [", shared requantised"] if self.requantize else []
        if self.padded_width is not None:
            extras.append(f", padded to {self.padded_width}")
        return f"{decision} on {self.backend}, activations {self.activations}{''.join(extras)}"

    @property
    def ranks(self) -> str:
        """``0 to 7: 32 experts each``, or by groups of ranks that hold equally many."""
        parts, first = [], 0
        for count, group in groupby(self.experts_by_rank):
            last = first + len(list(group)) - 1
            ranks = f"{first}" if first == last else f"{first} to {last}"
            parts.append(f"{ranks}: {count} experts" + ("" if first == last else " each"))
            first = last + 1
        return "; ".join(parts) or "all"


@dataclass(frozen=True)
class PlanFile:
    """A checkpoint's plan; :meth:`foldmoe.planner.CheckpointPlan.as_dict` says what each field is.

    ``command`` and ``versions`` are ``foldmoe plan``'s own: what plans the same again, and with which foldmoe.
    """

    source: str
    device: str
    ep_size: int
    tp_size: int
    summary: str
    digest: str
    notes: tuple[str, ...] = ()
    layers: tuple[PlanRow, ...] = ()
    command: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> PlanFile:
        """Read a plan.

        Raises:
            ValueError: a file of another kind, or a damaged one.
        """
        return result_file.load(path, KIND, cls, partial=True)


def plan_section(plan: PlanFile, path: str) -> Section:
    """Runs of layers that are planned alike, with what every rank does and why nothing better."""
    ranks = plan.ep_size * plan.tp_size
    lead = [f"{plan.summary}."]
    if ranks > 1:
        sizes = " x ".join(f"{kind} {size}" for kind, size in (("EP", plan.ep_size), ("TP", plan.tp_size)) if size > 1)
        lead.append(f"Planned for {sizes}: every rank takes the same decision; bytes are the fullest rank's.")
    groups = [list(group) for _, group in groupby(plan.layers, key=lambda row: row.key)]
    table = Table(
        f"How the MoE layers of {plan.source} run on {plan.device}",
        ("layers", "runs", "stored", "expert-parallel ranks", "bytes a rank", "extra", "why not better, and notes"),
        tuple(_cells(group) for group in groups),
        frozenset(("layers", "runs", "stored", "expert-parallel ranks", "why not better, and notes")),
        {i: "best" if group[0].arm == "folded" else "bad" for i, group in enumerate(groups)},
    )
    notes = (Notes("Notes on the checkpoint", plan.notes),) if plan.notes else ()
    source = Source(path, plan.command, {"plan digest": plan.digest, "device": plan.device, **plan.versions})
    return Section(f"Plan: {plan.source}", tuple(lead), (table, *notes, source))


def _cells(group: list[PlanRow]) -> tuple[str, ...]:
    first = group[0]
    name = span(first.layer, group[-1].layer)
    if len(group) > 1:
        name += f" ({len(group)} layers)"
    stored = f"routed {first.routed}; shared {first.shared}" if first.shared else first.routed
    return (
        name + (", draft" if first.draft else ""),
        first.how,
        stored,
        first.ranks,
        f"{sum(row.bytes_after for row in group):,}",
        f"{sum(row.extra_bytes for row in group):+,}",
        "; ".join((*first.reasons, *first.notes)) or "nothing was refused",
    )
