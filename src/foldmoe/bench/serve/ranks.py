"""What a running server's ranks say of themselves: the files that the vLLM plugin writes to ``FOLDMOE_STATE_DIR``."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from foldmoe.integrations.vllm.record import SCHEMA

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True)
class Rank:
    """One rank's file.

    Args:
        rank: its number.
        world_size: how many ranks there are.
        asked: the value of ``FOLDMOE_FOLD`` that it read.
        planned: "folded", "dual-stream", "serial", "stock" or "mixed": what its layers were planned as.
        runs: likewise, what it really does on its device.
        stock_shared_stream: whether the engine's own layers run shared experts on another stream; None: cannot.
        layers: one plan a MoE layer, as the plugin prints it.
        digest: over all plans.
        complete: every MoE layer has been loaded.
        model_load_bytes: that weights take on the device; None on a CPU.
        workspace_bytes: of our scratch.
        kv_blocks: of the KV cache; None before it is laid out.
        versions: of packages.
    """

    rank: int
    world_size: int
    asked: str
    planned: str
    runs: str
    stock_shared_stream: bool | None
    layers: tuple[dict[str, Any], ...]
    digest: str
    complete: bool
    model_load_bytes: int | None
    workspace_bytes: int
    kv_blocks: int | None
    versions: dict[str, str]

    @property
    def layers_by_arm(self) -> dict[str, int]:
        """How many layers run which way."""
        return dict(Counter(layer["arm"] for layer in self.layers))

    def decisions(self) -> tuple[str, ...]:
        """For people: how many layers run which way, then every reason with the layers that it concerns."""
        counts = ", ".join(f"{count} {arm}" for arm, count in self.layers_by_arm.items())
        lines = [f"MoE layers: {counts}; runs as {self.runs}"]
        rows = [(str(layer["layer"]), reason) for layer in self.layers for reason in layer.get("reasons", ())]
        # Reasons name their layer; without it the same reason of forty layers is one line.
        rows.sort(key=lambda row: row[1].replace(row[0], ""))
        for _, group in groupby(rows, key=lambda row: row[1].replace(row[0], "")):
            same = list(group)
            more = f" (and {len(same) - 1} more layers)" if len(same) > 1 else ""
            lines.append(f"{same[0][0]}{more}: {same[0][1]}")
        return tuple(lines)

    def why(self) -> str:
        """The first reason there is for running as it does, to end a message with."""
        if self.planned != self.runs:
            return f": its device cannot run {self.planned} layers"
        reason = next((reason for layer in self.layers for reason in layer.get("reasons", ())), "")
        return f": {reason}" if reason else ""


def read(folder: Path) -> list[Rank]:
    """All ranks' files, in order; none where nobody wrote.

    Raises:
        ValueError: a file of another schema, or one that lacks a field.
    """
    return sorted((_read(path) for path in folder.glob("rank-*.json")), key=lambda rank: rank.rank)


def different_plans(found: Sequence[Rank]) -> str:
    """Ranks that hold the same layers and plan them differently, with their digests; empty where there are none.

    Stages of a pipeline hold other layers, so that their digests differ by nature.
    """
    alike: dict[frozenset[str], list[Rank]] = {}
    for rank in found:
        alike.setdefault(frozenset(str(layer["layer"]) for layer in rank.layers), []).append(rank)
    differing = next((group for group in alike.values() if len({rank.digest for rank in group}) > 1), [])
    return ", ".join(f"rank {rank.rank} {rank.digest}" for rank in differing)


def together(found: Sequence[Rank]) -> Rank:
    """The first rank with the layers of all pipeline stages, each once."""
    layers = {str(layer["layer"]): layer for rank in reversed(found) for layer in reversed(rank.layers)}
    return replace(found[0], layers=tuple(reversed(layers.values())))


def _read(path: Path) -> Rank:
    found = json.loads(path.read_text())
    if found.get("schema") != SCHEMA:
        raise ValueError(
            f"{path.name}: expected schema {SCHEMA}, found {found.get('schema')!r}: the server's foldmoe is another "
            "version than this one"
        )
    try:
        return Rank(
            rank=found["rank"],
            world_size=found["world_size"],
            asked=found["asked"]["fold"],
            planned=found["arm"],
            runs=found["arm_run"],
            stock_shared_stream=found["stock_shared_stream"],
            layers=tuple(found["layers"]),
            digest=found["digest"],
            complete=found["complete"],
            model_load_bytes=found["model_load_bytes"],
            workspace_bytes=found["workspace_bytes"],
            kv_blocks=found["kv_blocks"],
            versions=found["versions"],
        )
    except KeyError as error:
        raise ValueError(f"{path.name} lacks {error}: it was not written by foldmoe's vLLM plugin") from error
