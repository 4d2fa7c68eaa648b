"""``LayerPlan``: the one decision about a layer, made once and handed to loader, backend, integration and report."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from foldmoe.moe.spec import ActivationPrecision, LayerSpec, Placement
from foldmoe.planner.policy import FusionPolicy

Strategy = Literal["native", "slot", "serial"]
Arm = Literal["folded", "dual-stream", "serial", "stock"]
Rows = tuple[int, int | None]


@dataclass(frozen=True)
class LayerPlan:
    """How one layer runs, and why not better.

    Args:
        spec: the layer's facts.
        strategy: "native" (shared expert folded as stored), "slot" (folded as one more routed expert) or "serial".
        arm: "folded", or how an unfolded layer runs: "serial", "dual-stream" or "stock" (the engine's own layer).
        backend: name of the backend; "stock" where the engine keeps the layer.
        activations: precision of x and act(.).
        reasons: why each better strategy, backend or precision was refused, and other facts worth a line.
        bytes_before: bytes of this layer's experts that one rank holds as stored, unfolded; a block of rows
            that reaches over the boundary of gate and up has its scale on both sides.
        bytes_after: bytes that one rank holds under this plan.
        requantize: the shared expert is lowered to the routed format, because the user asked by name.
        padded_width: width that the shared expert is padded to; None: its own.
        fold_rows: ranges (start, end) of token counts where folding measured faster; outside them the layer runs
            dual-stream over the same packed weights. Empty for an unfolded layer.
        placement: where this rank stands.
        tiles: how the backend chooses its tiles: from measurements on this device, or by a heuristic; no part of what
            ranks agree on, as it changes no bits.
        policy: what was asked for; no part of it either, as the rest says what came of it.
    """

    spec: LayerSpec
    strategy: Strategy
    arm: Arm
    backend: str
    activations: ActivationPrecision
    reasons: tuple[str, ...] = ()
    bytes_before: int = 0
    bytes_after: int = 0
    requantize: bool = False
    padded_width: int | None = None
    fold_rows: tuple[Rows, ...] = ()
    placement: Placement = field(default_factory=Placement)
    tiles: str = ""
    policy: FusionPolicy = field(default_factory=FusionPolicy)

    @property
    def layer(self) -> str:
        return self.spec.name

    @property
    def folded(self) -> bool:
        return self.arm == "folded"

    @property
    def extra_bytes(self) -> int:
        """Bytes a rank holds beyond the unfolded layer's."""
        return self.bytes_after - self.bytes_before

    def folds_at(self, tokens: int) -> bool:
        """Whether a batch of ``tokens`` rows runs folded."""
        return self.folded and any(start <= tokens and (end is None or tokens < end) for start, end in self.fold_rows)

    def decision(self) -> dict[str, Any]:
        """What every rank must agree on; no rank's own place and no text for people."""
        s = self.spec
        return {
            "layer": s.name,
            "strategy": self.strategy,
            "arm": self.arm,
            "backend": self.backend,
            "activations": self.activations,
            "requantize": self.requantize,
            "padded_width": self.padded_width,
            "fold_rows": [list(rows) for rows in self.fold_rows],
            "hidden": s.hidden,
            "top_k": s.top_k,
            "routed": str(s.routed),
            "shared": str(s.shared),
            "ep_size": self.placement.ep_size,
            "tp_size": self.placement.tp_size,
        }

    @property
    def digest(self) -> str:
        """Twelve hex digits over :meth:`decision`; ranks compare them once, at load."""
        return hashlib.sha256(json.dumps(self.decision(), sort_keys=True).encode()).hexdigest()[:12]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the decision, its reasons and bytes, and how many routed experts each rank holds."""
        place, count = self.placement, self.spec.routed.count
        return {
            **self.decision(),
            "reasons": list(self.reasons),
            "tiles": self.tiles,
            "notes": list(self.spec.notes),
            "draft": self.spec.draft,
            "shared_gate": self.spec.shared_gate,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "extra_bytes": self.extra_bytes,
            "placement": asdict(place),
            "experts_by_rank": [len(replace(place, ep_rank=rank).experts(count)) for rank in range(place.ep_size)],
            "digest": self.digest,
        }

    def __str__(self) -> str:
        how = self.strategy if self.folded else self.arm
        return f"{self.layer}: {how} on {self.backend}, activations {self.activations}, {self.extra_bytes:+,} B"
