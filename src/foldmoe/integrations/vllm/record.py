"""What became of every MoE layer of this process: log lines, agreement over ranks, and the state file.

A layer is entered when vLLM builds it and reported once all entered layers have their weights, so that the counts hold
draft models too, which vLLM loads after the main one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from foldmoe.parallel.agree import compare

if TYPE_CHECKING:
    from pathlib import Path
    from weakref import ReferenceType

    from foldmoe.layer import FoldedMoE
    from foldmoe.parallel.transport import Transport
    from foldmoe.planner import FusionPolicy, LayerPlan

SCHEMA = 1


@dataclass
class Entry:
    """One MoE layer.

    Args:
        name: vLLM's, e.g. ``model.layers.3.mlp.experts``.
        plan: how it folds; None for a layer that stays with vLLM.
        reasons: why it stays.
        owner: weakly, the runner of the layer; None where nobody asks whether it still lives.
        packed: weakly, the packed layer, once loaded.
        loaded: its weights are there.
        shared_stream: vLLM runs the shared expert of this layer on a second stream; None where it has none.
        draft: it belongs to a draft model (MTP).
        slot_zeros: bytes of the slot that hold nothing but the zeros behind this rank's part of the shared expert.
    """

    name: str
    plan: LayerPlan | None = None
    reasons: tuple[str, ...] = ()
    owner: ReferenceType[Any] | None = None
    packed: ReferenceType[FoldedMoE] | None = None
    loaded: bool = False
    shared_stream: bool | None = None
    draft: bool = False
    slot_zeros: int = 0

    @property
    def gone(self) -> bool:
        """Its engine was dropped in this process."""
        return self.owner is not None and self.owner() is None

    @property
    def moe(self) -> FoldedMoE | None:
        return None if self.packed is None else self.packed()

    @property
    def folded(self) -> bool:
        return self.plan is not None and self.plan.folded

    @property
    def arm(self) -> str:
        return "stock" if self.plan is None else self.plan.arm

    @property
    def line(self) -> str | None:
        """For the log, where the layer does not fold."""
        if self.folded:
            return None
        reasons = self.reasons if self.plan is None else self.plan.reasons
        return f"foldmoe: {self.name}{' (draft)' if self.draft else ''}: {self.arm}: {'; '.join(reasons)}"

    def decision(self) -> dict[str, Any]:
        """What all ranks must agree on."""
        return {"layer": self.name, "arm": "stock"} if self.plan is None else self.plan.decision()

    def as_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"layer": self.name, "arm": "stock", "strategy": "serial", "backend": "stock"}
        facts["reasons"] = list(self.reasons)
        facts = facts if self.plan is None else self.plan.as_dict()
        return {**facts, "draft": self.draft, "slot_zeros": self.slot_zeros}


@dataclass
class Record:
    """All layers of one process.

    Args:
        policy: what was asked for.
        state_dir: where the state file goes; None for nowhere.
        versions: of what matters to a reader of the file.
        compile_ahead: whether kernels are compiled while the server starts. begun: layers whose kernels are.
    """

    policy: FusionPolicy
    state_dir: Path | None = None
    versions: dict[str, str] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
    model_load_bytes: int | None = None
    kv_blocks: int | None = None
    compile_ahead: bool = True
    begun: int = 0

    def enter(self, entry: Entry) -> Entry:
        """Add a layer; those of an engine that is gone go.

        vLLM builds a draft model once all of the main one is loaded, and gives no other sign of it.
        """
        if any(earlier.gone for earlier in self.entries):
            self.entries = [earlier for earlier in self.entries if not earlier.gone]
            self.begun = 0
        entry.draft = self.complete or any(earlier.draft for earlier in self.entries)
        self.entries.append(entry)
        return entry

    @property
    def complete(self) -> bool:
        return bool(self.entries) and all(entry.loaded for entry in self.entries)

    @property
    def plans(self) -> list[LayerPlan]:
        return [entry.plan for entry in self.entries if entry.plan is not None]

    def count(self, strategy: str) -> int:
        return sum(plan.folded and plan.strategy == strategy for plan in self.plans)

    @property
    def extra_bytes(self) -> int:
        return sum(plan.extra_bytes for plan in self.plans)

    @property
    def arm(self) -> str:
        """The one arm of all layers, or "mixed": layers that were refused are stock ones among others."""
        arms = Counter(entry.arm for entry in self.entries)
        ours = [arm for arm in arms if arm != "stock"]
        return "stock" if not ours else ours[0] if len(arms) == 1 else "mixed"

    @property
    def arm_run(self) -> str:
        """The arm that the device really runs: without a GPU there is no second stream."""
        return "serial" if self.arm == "dual-stream" and self.device == "cpu" else self.arm

    @property
    def digest(self) -> str:
        """Twelve hex digits over all decisions; equal on every rank that holds the same layers."""
        found = [entry.decision() for entry in self.entries]
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:12]

    def lines(self) -> list[str]:
        """For the log: a summary, then one line for each layer that does not fold, with its reasons."""
        native, slot = self.count("native"), self.count("slot")
        summary = (
            f"foldmoe: folded {native + slot}/{len(self.entries)} layers (native {native}, slot {slot}), "
            f"{self.extra_bytes:+,} B"
        )
        if drafts := [entry for entry in self.entries if entry.draft]:
            summary += f", draft layers {sum(entry.folded for entry in drafts)}/{len(drafts)}"
        lines = [summary, *(line for entry in self.entries if (line := entry.line))]
        if zeros := sum(entry.slot_zeros for entry in self.entries):
            lines.append(
                f"foldmoe: slots hold {zeros:,} B of zeros that vLLM put behind this rank's part of the shared expert: "
                "a slot is as wide as a routed expert; FOLDMOE_FOLD=native does not keep them"
            )
        return lines

    def agree(self, transport: Transport) -> None:
        """Compare decisions over the ranks that share the layers.

        Raises:
            PlanMismatchError: naming ranks and layers.
        """
        compare([{entry.name: entry.decision() for entry in self.entries}], transport)

    def as_dict(self) -> dict[str, Any]:
        """The state file."""
        streams = {entry.shared_stream for entry in self.entries if entry.shared_stream is not None}
        policy = self.policy
        workspaces = [entry.moe.memory()["workspace"] for entry in self.entries if entry.moe is not None]
        return {
            "schema": SCHEMA,
            "pid": os.getpid(),
            "rank": self.rank,
            "world_size": self.world_size,
            "versions": {**self.versions, "torch": torch.__version__},
            "arm": self.arm,
            "arm_run": self.arm_run,
            "asked": {
                "fold": policy.fold,
                "backend": policy.backend,
                "activations": policy.activations,
                "allow_requantize": policy.allow_requantize,
            },
            "stock_shared_stream": streams.pop() if len(streams) == 1 else None,
            "layers_total": len(self.entries),
            "layers_folded": self.count("native") + self.count("slot"),
            "native": self.count("native"),
            "slot": self.count("slot"),
            "draft_total": sum(entry.draft for entry in self.entries),
            "draft_folded": sum(entry.draft and entry.folded for entry in self.entries),
            "extra_bytes": self.extra_bytes,
            "slot_zeros": sum(entry.slot_zeros for entry in self.entries),
            "moe_bytes": sum(entry.moe.memory()["weights"] for entry in self.entries if entry.moe is not None),
            "model_load_bytes": self.model_load_bytes,
            "workspace_bytes": max(workspaces, default=0),
            "kv_blocks": self.kv_blocks,
            "digest": self.digest,
            "complete": self.complete,
            "layers": [entry.as_dict() for entry in self.entries],
        }

    def write(self) -> None:
        """Write ``rank-N.json``, whole or not at all."""
        if self.state_dir is None:
            return
        self.state_dir.mkdir(parents=True, exist_ok=True)
        target = self.state_dir / f"rank-{self.rank}.json"
        part = target.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")
        part.replace(target)
