"""Generated checkpoints, one of each kind, made once, and a writer for odd ones."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from foldmoe.checkpoint.generate import KINDS, generate

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by kind. Read only."""
    root = tmp_path_factory.mktemp("kinds")
    return {kind: generate(kind, root / kind) for kind in KINDS}


@pytest.fixture
def changed(kinds: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a kind in one shard, after ``change(tensors, config)`` had its way with it."""

    def make(kind: str, change: Callable[[dict[str, Tensor], dict[str, Any]], None], name: str = "changed") -> Path:
        tensors: dict[str, Tensor] = {}
        for shard in sorted(kinds[kind].glob("*.safetensors")):
            tensors |= load_file(shard)
        config = json.loads((kinds[kind] / "config.json").read_text())
        change(tensors, config)
        folder = tmp_path / name
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make
