"""From a checkpoint to a folded layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foldmoe.checkpoint import CheckpointError, Headers, OpaqueLayer, find_layer, read_headers, read_layers
from foldmoe.checkpoint.reader import read_layer
from foldmoe.layer import FoldedMoE
from foldmoe.planner import FusionPolicy, plan_layer
from foldmoe.planner.devices import torch_device

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from foldmoe.moe import Placement


def load_layer(
    path: str | Path | Headers,
    layer: str | int,
    *,
    policy: FusionPolicy | None = None,
    placement: Placement | None = None,
    device: torch.device | str | None = None,
) -> FoldedMoE:
    """Read one layer of a checkpoint, expert by expert, and fold it.

    Args:
        path: a folder with .safetensors shards, or one file; or its headers, where many layers are loaded.
        layer: its name (``layers.3.ffn``) or number.
        policy: what is asked for.
        placement: this rank's part; the whole layer by default.
        device: where it goes; the GPU if there is one.

    Raises:
        CheckpointError: tensors that are missing, unexpected or damaged, all listed; or a layer that is not read here.
        ValueError: a NaN or Inf, by tensor name and index; or a device that is not here.
    """
    target = torch_device(device)
    headers = path if isinstance(path, Headers) else read_headers(path)
    found = find_layer(read_layers(headers), layer)
    if isinstance(found.spec, OpaqueLayer):
        raise CheckpointError(f"{found.name}: {'; '.join(found.spec.reasons)}")
    plan = plan_layer(found.spec, policy, target, placement)
    tensors = read_layer(headers, found, placement, device=target)
    moe = FoldedMoE(
        tensors.routed,
        tensors.shared,
        plan=plan,
        consume=True,
        name=found.name,
    )
    moe.stored_as = found
    return moe
