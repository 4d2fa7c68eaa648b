"""Checkpoints that differ from a sound one in what a test changes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, TypeAlias

from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    Change: TypeAlias = "Callable[[dict[str, Tensor], dict[str, Any]], None]"


def changed_copy(source: Path, folder: Path, change: Change) -> Path:
    """A copy of ``source`` in one shard, after ``change(tensors, config)`` had its way with it."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(source.glob("*.safetensors")):
        tensors |= load_file(shard)
    config = json.loads((source / "config.json").read_text())
    change(tensors, config)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder
