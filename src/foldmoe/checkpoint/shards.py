"""One safetensors file's header: read without touching a weight, and checked before anything trusts it.

Layout (safetensors format): eight bytes little-endian header length, that many bytes of JSON, then the tensors' bytes
back to back. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from math import prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from pathlib import Path

MAX_HEADER_BYTES = 100_000_000
"""The bound that the safetensors library sets itself."""

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
    "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits of one element. F4 shapes count logical 4-bit elements."""

TORCH_DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "F16": torch.float16,
    "BF16": torch.bfloat16, "I32": torch.int32, "F32": torch.float32, "I64": torch.int64, "F64": torch.float64,
    "F4": torch.float4_e2m1fn_x2,
}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that cannot be read as it is; the message names the file or tensor and says what to do."""


class ForeignFormatError(CheckpointError):
    """Tensors that are whole as far as can be told, in a format that is not read here."""


@dataclass(frozen=True)
class TensorHeader:
    """What a header says of one tensor. Instances are shared between tensors that agree in all three.

    Args:
        dtype: safetensors name, e.g. "F8_E4M3".
        shape: as written; F4 counts 4-bit elements.
        shard: file that holds it, relative to the checkpoint.
    """

    dtype: str
    shape: tuple[int, ...]
    shard: str

    @cached_property
    def nbytes(self) -> int:
        return prod(self.shape) * BITS[self.dtype] // 8

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """None for a dtype that torch does not have."""
        return TORCH_DTYPES.get(self.dtype)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape that torch gives the tensor: packed 4-bit elements count two to one."""
        return (*self.shape[:-1], self.shape[-1] // 2) if self.dtype == "F4" and self.shape else self.shape

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class ShardEntry:
    """One tensor in a shard: its header and its bytes, ``start`` .. ``end`` from the beginning of the file."""

    name: str
    header: TensorHeader
    start: int
    end: int


def read_shard(path: Path, label: str | None = None) -> tuple[list[ShardEntry], dict[str, str]]:
    """Tensors of one file in the order of their bytes, and its metadata.

    Raises:
        CheckpointError: truncated or damaged in any way; the message names the file.
    """
    label = label or path.name
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                file.seek(0)
                _refuse_text(file.read(64), label)
                raise CheckpointError(
                    f"{label}: truncated: the header needs {length + 8:,} bytes, the file has {size:,}; "
                    "download or write it again"
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{label}: header of {length:,} bytes, more than {MAX_HEADER_BYTES:,} allowed")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{label}: cannot be read: {error.strerror or error}") from error
    entries, metadata = parse_header(raw, label)
    end = 8 + length
    entries.sort(key=attrgetter("start", "end"))
    for entry in entries:
        if entry.start != end:
            kind = "overlaps the tensor before it" if entry.start < end else "leaves a gap after the tensor before it"
            raise CheckpointError(f"{label}: damaged header: {entry.name} starts at byte {entry.start}, {kind} ({end})")
        end = entry.end
    if end != size:
        what = "truncated" if size < end else "longer than its header says"
        raise CheckpointError(
            f"{label}: {what}: expected {end:,} bytes, the file has {size:,}; download or write it again"
        )
    return entries, metadata


def _refuse_text(start: bytes, label: str) -> None:
    """Name text that is given for a shard: its first letters would make an absurd length."""
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            f"{label}: a Git LFS pointer, which only stands for the file; run 'git lfs pull', or download the file"
        )
    # A real length ends in zero bytes, whatever its first one looks like.
    if len(start) >= 8 and 0 not in start[:8] and start.lstrip()[:1] in (b"{", b"["):
        raise CheckpointError(
            f"{label}: JSON, no safetensors file; give the checkpoint's folder, or a .safetensors file"
        )


def parse_header(raw: bytes, label: str) -> tuple[list[ShardEntry], dict[str, str]]:
    """Entries of a header's JSON, each checked for itself.

    Raises:
        CheckpointError: no JSON, duplicate names, unknown dtypes, or byte ranges that do not fit dtype and shape.
    """
    try:
        content = json.loads(raw, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{label}: damaged header: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{label}: damaged header: expected a JSON object")
    metadata = content.pop("__metadata__", {})
    base = 8 + len(raw)
    shared: dict[tuple[str, tuple[int, ...]], TensorHeader] = {}
    entries = []
    for name, fields in content.items():
        dtype, shape, start, end = _fields(name, fields, label)
        header = shared.get((dtype, shape))
        if header is None:
            _check_kind(name, dtype, shape, label)
            header = shared.setdefault((dtype, shape), TensorHeader(dtype, shape, label))
        if end - start != header.nbytes:
            raise CheckpointError(
                f"{label}: damaged header: {name} {header} needs {header.nbytes} bytes, its range holds {end - start}"
            )
        entries.append(ShardEntry(name, header, base + start, base + end))
    return entries, metadata if isinstance(metadata, dict) else {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the name {twice!r} appears twice")
    return found


def _fields(name: str, fields: Any, label: str) -> tuple[str, tuple[int, ...], int, int]:
    try:
        dtype, shape, (start, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        hash((dtype, shape))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{label}: damaged header: {name} lacks dtype, shape or data_offsets") from error
    if type(start) is not int or type(end) is not int or start < 0:
        raise CheckpointError(f"{label}: damaged header: {name} has the byte range {start} .. {end}")
    return dtype, shape, start, end


def _check_kind(name: str, dtype: str, shape: tuple[int, ...], label: str) -> None:
    if dtype not in BITS:
        raise CheckpointError(f"{label}: {name} has the unknown dtype {dtype!r}; expected one of {', '.join(BITS)}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise CheckpointError(f"{label}: damaged header: {name} has a shape of no counts: {list(shape)}")
