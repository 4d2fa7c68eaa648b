"""``plan_checkpoint``: every MoE layer of a checkpoint planned from its headers; no weight is read."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foldmoe.checkpoint.headers import read_headers
from foldmoe.checkpoint.specs import OpaqueLayer, read_layers
from foldmoe.moe.spec import Placement
from foldmoe.planner.decide import plan_layer
from foldmoe.planner.devices import Device, resolve

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from foldmoe.planner.plan import LayerPlan
    from foldmoe.planner.policy import FusionPolicy


@dataclass(frozen=True)
class StockLayer:
    """The decision about a layer that is not read here: the engine keeps it.

    It answers what a :class:`~foldmoe.planner.plan.LayerPlan` answers to a reader of the plan.
    """

    opaque: OpaqueLayer

    strategy = "serial"
    arm = "stock"
    backend = "stock"
    folded = False
    extra_bytes = 0

    @property
    def layer(self) -> str:
        return self.opaque.name

    @property
    def reasons(self) -> tuple[str, ...]:
        return self.opaque.reasons

    @property
    def draft(self) -> bool:
        return self.opaque.draft

    @property
    def digest(self) -> str:
        """Ranks agree on a stock layer by its name alone."""
        return hashlib.sha256(f"stock {self.layer}".encode()).hexdigest()[:12]

    def as_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "strategy": self.strategy,
            "arm": self.arm,
            "backend": self.backend,
            "reasons": list(self.reasons),
            "draft": self.draft,
            "stored_bytes": self.opaque.nbytes,
            "digest": self.digest,
        }


@dataclass(frozen=True)
class CheckpointPlan:
    """All MoE layers of a checkpoint, planned for the rank that holds the most.

    Args:
        source: path or repository.
        device: what it was planned for.
        placement: the rank that the bytes belong to.
        rows: one decision a layer, in the checkpoint's order, drafts last.
        notes: about index, shards and config.
    """

    source: str
    device: Device
    placement: Placement
    rows: tuple[LayerPlan | StockLayer, ...]
    notes: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The layers that are read here."""
        return tuple(row for row in self.rows if not isinstance(row, StockLayer))

    @property
    def stock(self) -> tuple[StockLayer, ...]:
        """The layers that are not."""
        return tuple(row for row in self.rows if isinstance(row, StockLayer))

    def layer(self, name: str) -> LayerPlan:
        """The plan of one layer.

        Raises:
            KeyError: no such layer, or one that is not read here.
        """
        for plan in self.layers:
            if plan.layer == name:
                return plan
        there = ", ".join(plan.layer for plan in self.layers)
        raise KeyError(f"no planned layer {name!r} in {self.source}; there are: {there}")

    @property
    def bytes_before(self) -> int:
        return sum(plan.bytes_before for plan in self.layers)

    @property
    def bytes_after(self) -> int:
        return sum(plan.bytes_after for plan in self.layers)

    @property
    def extra_bytes(self) -> int:
        return self.bytes_after - self.bytes_before

    @property
    def digest(self) -> str:
        """Over all layers' digests; ranks compare it once, at load."""
        return hashlib.sha256(" ".join(row.digest for row in self.rows).encode()).hexdigest()[:12]

    @property
    def summary(self) -> str:
        """One line: "40/40 layers fold natively, +0 B"."""
        total = len(self.rows)
        if not total:
            return "no MoE layers: nothing to fold"
        folded = {how: sum(p.folded and p.strategy == how for p in self.layers) for how in ("native", "slot")}
        words = {"native": "fold natively", "slot": "fold into a slot"}
        parts = [f"{count}/{total} layers {words[how]}" for how, count in folded.items() if count]
        rest = total - sum(folded.values())
        if rest:
            parts.append(f"{rest}/{total} {'do' if parts else 'layers do'} not fold")
        return f"{', '.join(parts)}, {self.extra_bytes:+,} B"

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the kind of a result file, then the plan."""
        return {
            "kind": "plan",
            "source": self.source,
            "device": self.device.name,
            "ep_size": self.placement.ep_size,
            "tp_size": self.placement.tp_size,
            "summary": self.summary,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "extra_bytes": self.extra_bytes,
            "digest": self.digest,
            "notes": list(self.notes),
            "layers": [row.as_dict() for row in self.rows],
        }


def plan_checkpoint(
    path_or_repo: str | Path,
    *,
    policy: FusionPolicy | None = None,
    ep_size: int = 1,
    tp_size: int = 1,
    device: Device | torch.device | str | None = None,
) -> CheckpointPlan:
    """Plan every MoE layer from headers and config.json.

    Args:
        path_or_repo: a folder, a .safetensors file, or a hub repository (needs the extra ``hub``).
        policy: what the user asks for.
        ep_size, tp_size: ranks that share the experts, or cut each expert's width.
        device: what to plan for; the best one present by default.

    Returns:
        The plan of rank 0, which holds as many experts as any rank.

    Raises:
        CheckpointError: a checkpoint that cannot be read at all. A single layer that cannot is planned as stock.
        ValueError: an unknown device or backend, or sizes below 1.
    """
    found, placement = resolve(device), Placement(ep_size, 0, tp_size, 0)
    headers = read_headers(path_or_repo)
    rows: list[LayerPlan | StockLayer] = []
    for layer in read_layers(headers):
        if isinstance(layer.spec, OpaqueLayer):
            rows.append(StockLayer(layer.spec))
        else:
            rows.append(plan_layer(layer.spec, policy, found, placement))
    return CheckpointPlan(headers.source, found, placement, tuple(rows), headers.notes)
