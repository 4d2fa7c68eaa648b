"""Generated checkpoints, one of each kind, made once, and a writer for odd ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from foldmoe.checkpoint.generate import KINDS, generate
from tests.support.checkpoints import changed_copy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.checkpoints import Change


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by kind. Read only."""
    root = tmp_path_factory.mktemp("kinds")
    return {kind: generate(kind, root / kind) for kind in KINDS}


@pytest.fixture
def changed(kinds: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a kind in one shard, after ``change(tensors, config)`` had its way with it."""

    def make(kind: str, change: Change, name: str = "changed") -> Path:
        return changed_copy(kinds[kind], tmp_path / name, change)

    return make
