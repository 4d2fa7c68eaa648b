"""A whole checkpoint's headers: a local folder, one file, or a repository on the hub. The shards decide.

An index file is a convenience that can be missing, incomplete or stale; what it says against the shards becomes a note.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foldmoe.checkpoint.shards import BITS, CheckpointError, TensorHeader, read_shard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NUMBERED = re.compile(r"-(\d{5})-of-(\d{5})\.safetensors$")
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class Headers:
    """All tensors of a checkpoint by name, without a weight read.

    Args:
        source: as the user named it.
        root: local folder; None for a hub repository.
        tensors: every tensor of every shard.
        config: config.json, empty if there is none.
        notes: what a reader should know about index, shards and config.
        absent: names that the index lists and no shard here holds.
        incomplete: those of the notes that say that shards or tensors are missing.
    """

    source: str
    root: Path | None
    tensors: Mapping[str, TensorHeader]
    config: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    incomplete: tuple[str, ...] = ()

    @property
    def config_path(self) -> str:
        """Of config.json, for messages."""
        return f"{self.source if self.root is None else self.root}/config.json"


def read_headers(path_or_repo: str | Path) -> Headers:
    """Headers of a local folder, a single .safetensors file or a hub repository ("owner/name").

    Raises:
        CheckpointError: nothing there, no safetensors shard, a damaged shard, or a tensor in two shards.
    """
    try:
        path = Path(path_or_repo).expanduser()
    except RuntimeError as error:
        raise CheckpointError(f"{path_or_repo}: {error} Name the folder in full") from error
    if path.is_file():
        return _local(str(path_or_repo), path.parent, [path])
    if path.is_dir():
        shards = sorted(p for p in path.glob("*.safetensors") if not p.name.startswith("."))
        if not shards:
            raise CheckpointError(f"{path_or_repo}: no *.safetensors file in this folder; other formats are not read")
        return _local(str(path_or_repo), path, shards)
    if _REPOSITORY.fullmatch(str(path_or_repo)):
        return _hub(str(path_or_repo))
    raise CheckpointError(f"{path_or_repo}: no such folder or file, and not a repository name like owner/name")


def _local(source: str, root: Path, shards: list[Path]) -> Headers:
    tensors: dict[str, TensorHeader] = {}
    for shard in shards:
        for entry in read_shard(shard)[0]:
            _add(tensors, entry.name, entry.header)
    config, notes = _config(root / "config.json")
    names = [shard.name for shard in shards]
    if source != str(root) and len(shards) == 1 and shards[0].name == Path(source).name:
        return Headers(source, root, tensors, config, notes)
    index, about_index = _index(root, names)
    absent = tuple(name for name in index or () if name not in tensors)
    incomplete = (*_missing_shards(names), *_index_note("lists {} tensors that no shard here holds", absent))
    notes = (*notes, *incomplete, *about_index, *([] if index is None else _index_notes(index, tensors)))
    return Headers(source, root, tensors, config, notes, absent, incomplete)


def _add(tensors: dict[str, TensorHeader], name: str, header: TensorHeader) -> None:
    if name in tensors:
        raise CheckpointError(
            f"{name} stands in two shards, {tensors[name].shard} and {header.shard}; remove the one that is too many"
        )
    tensors[name] = header


def _config(path: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    if not path.exists():
        return {}, ("config.json is missing: facts that tensors cannot tell (top-k, activation) are unknown",)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return found, ()


def _missing_shards(names: list[str]) -> list[str]:
    """Shards that the numbering of the others promises."""
    found: dict[int, set[int]] = {}
    for name in names:
        if match := _NUMBERED.search(name):
            found.setdefault(int(match[2]), set()).add(int(match[1]))
    absent = {total: set(range(1, total + 1)) - numbers for total, numbers in found.items()}
    return [
        f"{len(numbers)} of {total} shards are not there (first: number {min(numbers)})"
        for total, numbers in absent.items()
        if numbers
    ]


def _index(root: Path, shards: list[str]) -> tuple[dict[str, str] | None, list[str]]:
    """The index file's names and shards; None where it cannot be used, and a note then."""
    path = root / INDEX_NAME
    if not path.exists():
        note = f"{INDEX_NAME} is missing; the {len(shards)} shards were read instead"
        return None, [note] if len(shards) > 1 else []
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(shard) for name, shard in listed.items()}, []
    except (ValueError, KeyError, TypeError, AttributeError):
        return None, [f"{INDEX_NAME} cannot be read; the shards were read instead"]


def _index_notes(index: Mapping[str, str], tensors: Mapping[str, TensorHeader]) -> list[str]:
    """What else an index says against the shards. Its file names are compared, never opened."""
    unlisted = [name for name in tensors if name not in index]
    elsewhere = [name for name, shard in index.items() if name in tensors and tensors[name].shard != shard]
    return [
        *_index_note("does not list {} tensors that the shards hold", unlisted),
        *_index_note("names another shard for {} tensors", elsewhere),
    ]


def _index_note(what: str, names: Sequence[str]) -> list[str]:
    about = f"{INDEX_NAME} {what.format(len(names))}"
    return [f"{about} (first: {names[0]}); the shards decide"] if names else []


def _hub(repository: str) -> Headers:
    try:
        from huggingface_hub import get_safetensors_metadata, hf_hub_download
    except ImportError as error:
        raise CheckpointError(
            f"{repository}: no such local path; to read a hub repository install the extra: pip install 'foldmoe[hub]'"
        ) from error
    try:
        found = get_safetensors_metadata(repository)
        config_path = Path(hf_hub_download(repository, "config.json"))
    except Exception as error:  # the hub's client raises a family of network and HTTP errors of its own
        raise CheckpointError(
            f"{repository}: the hub could not be read ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Check the name and the network, or give a local folder"
        ) from error
    tensors: dict[str, TensorHeader] = {}
    for shard, metadata in found.files_metadata.items():
        for name, info in metadata.tensors.items():
            if info.dtype not in BITS:
                raise CheckpointError(f"{shard}: {name} has the unknown dtype {info.dtype!r}")
            _add(tensors, name, TensorHeader(info.dtype, tuple(info.shape), shard))
    config, notes = _config(config_path)
    return Headers(repository, None, tensors, config, notes)
