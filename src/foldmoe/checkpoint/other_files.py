"""Files of a checkpoint beside its shards, from one folder to another."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from foldmoe.checkpoint.headers import INDEX_NAME

if TYPE_CHECKING:
    from pathlib import Path

_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}


def copy_others(root: Path, folder: Path, below: str = "") -> tuple[str, ...]:
    """Copy what is neither shard, index nor config.json: tokenizer, licence and the like, subfolders too.

    Args:
        root: folder that is copied from.
        folder: folder that is copied to; may lie in ``root``.
        below: subfolder of ``root`` to begin at.

    Returns:
        What was left, relative to ``root``: weights in other formats or subfolders, hidden files, links to folders.
    """
    left: list[str] = []
    for path in sorted((root / below).iterdir()):
        name = path.relative_to(root).as_posix()
        if path.resolve() == folder.resolve() or (not below and _written_here(path)):
            continue
        if path.name.startswith(".") or path.suffix in _WEIGHTS or (path.is_dir() and path.is_symlink()):
            left.append(name)
        elif path.is_dir():
            left += copy_others(root, folder, name)
        elif path.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
        else:
            left.append(name)
    return tuple(left)


def _written_here(path: Path) -> bool:
    return path.name in (INDEX_NAME, "config.json") or (path.suffix == ".safetensors" and not path.name.startswith("."))
