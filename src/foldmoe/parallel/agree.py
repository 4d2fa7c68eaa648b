"""Every rank takes the same decision for every layer: compared once, at load."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from foldmoe.parallel.transport import Transport, as_transport
from foldmoe.planner import CheckpointPlan, LayerPlan

if TYPE_CHECKING:
    import torch.distributed as dist

Decisions = Mapping[str, Mapping[str, Any]]
"""Layer to what was decided about it."""


class PlanMismatchError(RuntimeError):
    """Ranks planned a layer differently; folding it would compute nonsense or hang."""


def agree(
    plan: LayerPlan | CheckpointPlan | Sequence[LayerPlan | CheckpointPlan],
    group: Transport | dist.ProcessGroup | None = None,
) -> None:
    """Compare plans over a group; every rank must call this, and every rank gets the same answer.

    Args:
        plan: this rank's; one a rank that is played here, for a simulation.
        group: a process group (None: the default one) or a transport.

    Raises:
        PlanMismatchError: naming rank, layer and difference.
    """
    plans = [plan] if isinstance(plan, LayerPlan | CheckpointPlan) else list(plan)
    compare([decisions(one) for one in plans], as_transport(group))


def decisions(plan: LayerPlan | CheckpointPlan) -> dict[str, dict[str, Any]]:
    """What was decided, layer by layer; a layer that the engine keeps is agreed on by its strategy and backend."""
    if isinstance(plan, LayerPlan):
        return {plan.layer: plan.decision()}
    found = {row.layer: row.decision() for row in plan.layers}
    for row in plan.stock:
        found[row.layer] = {"layer": row.layer, "strategy": row.strategy, "arm": row.arm, "backend": row.backend}
    return found


def compare(mine: Sequence[Decisions], transport: Transport) -> None:
    """Compare decisions: digests first, and only if they differ the decisions themselves.

    Raises:
        PlanMismatchError: naming every rank and layer that differs from rank 0.
    """
    digests = transport.gather_objects([_digest(one) for one in mine])
    if len(set(digests)) == 1:
        return
    everybody: list[Decisions] = transport.gather_objects(list(mine))
    lines = [
        f"rank {rank} differs from rank 0 in {layer}: {difference}"
        for rank, theirs in enumerate(everybody)
        for layer, difference in _differences(everybody[0], theirs)
    ]
    raise PlanMismatchError(
        "ranks of one group must fold alike; start all with the same policy and settings\n  " + "\n  ".join(lines)
    )


def _digest(found: Decisions) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def _differences(first: Decisions, other: Decisions) -> list[tuple[str, str]]:
    found = []
    for layer in [*first, *(name for name in other if name not in first)]:
        if layer not in other or layer not in first:
            found.append((layer, "not planned there" if layer in first else "planned there only"))
            continue
        a, b = first[layer], other[layer]
        keys = [key for key in [*a, *(k for k in b if k not in a)] if a.get(key) != b.get(key)]
        if keys:
            found.append((layer, ", ".join(f"{key} is {b.get(key)!r}, not {a.get(key)!r}" for key in keys)))
    return found
