"""Write one safetensors file: streamed, read back, and only then given its name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from foldmoe.checkpoint.shards import BITS, CheckpointError, read_shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

CHUNK = 16 << 20
"""Bytes read or written at a time."""


@dataclass(frozen=True)
class Outgoing:
    """One tensor to write.

    Args:
        name, dtype, shape: as in a header (F4 shapes count 4-bit elements).
        chunks: gives the tensor's bytes in order, each time it is called.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS[self.dtype] // 8


def write_shard(path: Path, tensors: Sequence[Outgoing], metadata: Mapping[str, str] | None = None) -> None:
    """Write ``tensors`` to ``path``. The file has another name until every byte was read back and found right.

    Raises:
        CheckpointError: a full disk, or bytes that read back differently; nothing is left under either name.
    """
    temporary = path.with_name(f".{path.name}.unfinished")
    # Wide elements first, so that every tensor lies aligned to its own element size.
    ordered = sorted(tensors, key=lambda tensor: -BITS[tensor.dtype])
    try:
        digests = _write(temporary, ordered, metadata or {})
        _read_back(temporary, path.name, digests)
        os.replace(temporary, path)
    except OSError as error:
        what = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
        raise CheckpointError(f"{path.name}: cannot be written: {what}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write(path: Path, tensors: Sequence[Outgoing], metadata: Mapping[str, str]) -> dict[str, bytes]:
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]
        }  # fmt: skip
        offset += tensor.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    digests: dict[str, bytes] = {}
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for tensor in tensors:
            digest, written = hashlib.blake2b(), 0
            for chunk in tensor.chunks():
                file.write(chunk)
                digest.update(chunk)
                written += len(chunk)
            if written != tensor.nbytes:
                raise CheckpointError(f"{path.name}: {tensor.name} gave {written} bytes, expected {tensor.nbytes}")
            digests[tensor.name] = digest.digest()
        file.flush()
        os.fsync(file.fileno())
    return digests


def _read_back(path: Path, label: str, digests: Mapping[str, bytes]) -> None:
    entries, _ = read_shard(path, label)
    for entry in entries:
        digest = hashlib.blake2b()
        for chunk in file_chunks(path, entry.start, entry.end):
            digest.update(chunk)
        if digest.digest() != digests[entry.name]:
            raise CheckpointError(f"{label}: {entry.name} read back differently from what was written; check the disk")


def file_chunks(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Bytes ``start`` .. ``end`` of a file.

    Raises:
        CheckpointError: if the file ends before that.
    """
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            chunk = file.read(min(CHUNK, end - start))
            if not chunk:
                raise CheckpointError(f"{path.name}: ends at byte {start:,}, expected {end:,}")
            start += len(chunk)
            yield chunk
