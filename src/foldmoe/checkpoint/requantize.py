"""A new checkpoint whose shared experts are MXFP4: lower precision, asked for by name and reported per layer.

Order of events: every shard is streamed to a temporary name, read back and renamed; other files and the index follow;
config.json comes last. A folder without config.json is therefore an interrupted run, never a whole checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foldmoe.checkpoint.headers import INDEX_NAME, Headers, read_headers
from foldmoe.checkpoint.other_files import copy_others
from foldmoe.checkpoint.reader import TensorReader, stored_matrix
from foldmoe.checkpoint.shard_writer import Outgoing, file_chunks, write_shard
from foldmoe.checkpoint.shards import CheckpointError, ShardEntry, read_shard
from foldmoe.checkpoint.specs import MoELayer, OpaqueLayer, read_layers
from foldmoe.formats import Format, mxfp4

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from foldmoe.checkpoint.families import Matrix, Slot
    from foldmoe.checkpoint.stored import StoredMatrix


@dataclass(frozen=True)
class LayerLoss:
    """What requantising one layer's shared expert cost.

    Args:
        before: format that was stored.
        rms: ||new - old|| / ||old|| over all its weights.
        worst: the same of the worst block of 32 columns.
        bytes_before, bytes_after: stored bytes of the shared expert.
    """

    layer: str
    before: Format
    rms: float
    worst: float
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class Requantized:
    """What was written.

    Args:
        losses: one a layer that was changed.
        kept: layers left as they were, and why.
        left: files and folders of the source that were not copied, relative to it.
    """

    out: Path
    losses: tuple[LayerLoss, ...]
    kept: tuple[str, ...]
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Change:
    """One projection that gets new values and scales."""

    layer: MoELayer
    matrix: Matrix
    values: str
    scales: str
    new_scales: bool
    shape: tuple[int, int]


def requantize(source: str | Path, out: str | Path, *, progress: Callable[[str], None] | None = None) -> Requantized:
    """Write ``source`` to the folder ``out``, shared experts in MXFP4 where the routed ones are; else byte for byte.

    Layers whose routed experts have another format stay as they are. A changed expert's global and input scales are
    left out: they belong to its old format, and MXFP4 has neither. Other files come along, subfolders too, but for
    weights in other formats and hidden files.

    Args:
        progress: called with the name of each finished shard.

    Raises:
        CheckpointError: a source that is no local folder, that lacks shards or tensors or has damaged layers, all
            listed; nothing to requantise; a folder ``out`` that is not empty, too little space, a weight that is not
            finite, or a shard that could not be written; whatever is in ``out`` then lacks config.json.
    """
    if Path(source).expanduser().is_file():
        raise CheckpointError(f"{source} is a file; a copy is made of a whole checkpoint: give its folder")
    headers = read_headers(source)
    folder = Path(out)
    if headers.root is None:
        raise CheckpointError(f"{source}: headers only; download the repository first")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            f"{out} exists and is not empty; give another folder (one without config.json is an interrupted run)"
        )
    layers = read_layers(headers)
    _refuse_damage(headers, layers)
    changes = {c.values: c for layer in layers for c in _changes(layer)}
    if not changes:
        raise CheckpointError(f"{source}: no shared expert that could be requantised; {'; '.join(_kept(layers))}")
    folder.mkdir(parents=True, exist_ok=True)
    needed, free = sum(h.nbytes for h in headers.tensors.values()), shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(f"{out}: about {needed:,} bytes are needed, {free:,} are free; give a folder elsewhere")
    with TensorReader(headers) as reader:
        quantized = _Quantizer(reader, changes)
        weight_map = _write_shards(headers, headers.root, folder, quantized, progress or (lambda _: None))
        losses = tuple(quantized.loss(layer) for layer in layers if list(_changes(layer)))
    left = copy_others(headers.root, folder)
    _write_json(folder / INDEX_NAME, {"metadata": {}, "weight_map": weight_map})
    before = sorted({loss.before.value for loss in losses})
    note = {"shared_experts": "mxfp4", "requantized_from": before}
    _write_json(folder / "config.json", {**headers.config, "foldmoe": note})
    return Requantized(folder, losses, _kept(layers), left)


def _refuse_damage(headers: Headers, layers: tuple[MoELayer, ...]) -> None:
    """A copy that lists only what is there would look whole."""
    damage = [*headers.incomplete]
    for layer in layers:
        if isinstance(layer.spec, OpaqueLayer):
            damage += (f"{layer.name}: {reason}" for reason in layer.spec.damage)
    if damage:
        listed = "\n  ".join(damage)
        raise CheckpointError(f"{headers.source}: incomplete or damaged; download or write it again:\n  {listed}")


def _changes(layer: MoELayer) -> Iterator[_Change]:
    stored = layer.audit.shared
    if stored is None or _why_kept(layer) is not None:
        return
    suffix = next((n.rsplit(".", 1)[1] for s, n in _routed_names(layer).items() if s.kind == "scales"), "weight_scale")
    parts: dict[Matrix, StoredMatrix | None] = {
        "gate": stored.gate, "up": stored.up, "gate_up": stored.gate_up, "down": stored.down
    }  # fmt: skip
    for matrix, part in parts.items():
        if part is not None:
            made = f"{part.values.removesuffix('.weight')}.{suffix}"
            shape = part.rows, part.columns
            yield _Change(layer, matrix, part.values, part.scales or made, part.scales is None, shape)


def _routed_names(layer: MoELayer) -> dict[Slot, str]:
    """Any routed expert's names; a stack's are spelled too differently to copy from."""
    return next(iter(layer.block.experts.values()), {})


def _kept(layers: tuple[MoELayer, ...]) -> tuple[str, ...]:
    reasons = ((layer.name, _why_kept(layer)) for layer in layers)
    return tuple(f"{name}: {reason}" for name, reason in reasons if reason is not None)


def _why_kept(layer: MoELayer) -> str | None:
    """What leaves a layer as it is; None if its shared expert is requantised."""
    shared = layer.audit.shared
    if isinstance(layer.spec, OpaqueLayer):
        return f"not read ({layer.spec.reasons[0]})"
    if shared is None:
        return "no shared expert"
    if shared.format is Format.MXFP4:
        return "the shared expert is mxfp4 already"
    if layer.spec.routed.format is not Format.MXFP4:
        return f"the routed experts are {layer.spec.routed.format.value}, not mxfp4"
    return None


@dataclass(frozen=True)
class _Piece:
    """One projection's squared error and norm, its worst block, and its new bytes."""

    error: float
    norm: float
    worst: float
    nbytes: int


class _Quantizer:
    """Quantises projections when asked; values and scales may lie in different shards."""

    def __init__(self, reader: TensorReader, changes: dict[str, _Change]) -> None:
        self.changes = changes
        self.by_scales = {c.scales: c for c in changes.values()}
        self.left_out = {
            name
            for change in changes.values()
            for slot, name in change.layer.block.shared.items()
            if slot.kind not in ("values", "scales")
        }
        self._reader = reader
        self._pieces: dict[str, _Piece] = {}
        self.pair = lru_cache(maxsize=4)(self._pair)

    def _pair(self, values: str) -> tuple[Tensor, Tensor]:
        """New values (int8) and scales of the projection whose values have this name."""
        change = self.changes[values]
        shared = change.layer.audit.shared
        assert shared is not None
        old = stored_matrix(self._reader, change.layer.block.shared, change.matrix, shared)[0]
        plain = old.dequantize(torch.float32)
        try:
            new = mxfp4.quantize(plain)
        except ValueError as why:
            raise CheckpointError(f"{change.layer.name}: {values}, values times scales: {why}") from why
        assert new.scales is not None
        error, wide = (new.dequantize(torch.float32) - plain).to(torch.float64), plain.to(torch.float64)
        worst = (_block_norms(error) / _block_norms(wide).clamp_min(1e-300)).max()
        self._pieces[values] = _Piece(float(error.square().sum()), float(wide.square().sum()), float(worst), new.nbytes)
        return new.values.view(torch.int8), new.scales

    def outgoing(self, entry: ShardEntry, path: Path) -> list[Outgoing]:
        """What stands in the new shard for one tensor of the old; nothing for a scale that MXFP4 does not have."""
        if entry.name in self.left_out:
            return []
        if entry.name in self.changes:
            change = self.changes[entry.name]
            found = [self._new(change, 0, change.values)]
            return [*found, self._new(change, 1, change.scales)] if change.new_scales else found
        if entry.name in self.by_scales:
            return [self._new(self.by_scales[entry.name], 1, entry.name)]
        header = entry.header
        return [Outgoing(entry.name, header.dtype, header.shape, lambda: file_chunks(path, entry.start, entry.end))]

    def _new(self, change: _Change, which: int, name: str) -> Outgoing:
        rows, columns = change.shape

        def chunks() -> Iterator[bytes]:
            yield self.pair(change.values)[which].contiguous().view(torch.uint8).numpy().tobytes()

        if which == 0:
            return Outgoing(name, "I8", (rows, columns // 2), chunks)
        return Outgoing(name, "F8_E8M0", (rows, -(-columns // mxfp4.GROUP)), chunks)

    def loss(self, layer: MoELayer) -> LayerLoss:
        pieces = [self._pieces[change.values] for change in _changes(layer)]
        spec, shared = layer.spec, layer.audit.shared
        assert shared is not None
        assert not isinstance(spec, OpaqueLayer)
        assert spec.shared is not None
        norm = sum(piece.norm for piece in pieces)
        rms = (sum(piece.error for piece in pieces) / norm) ** 0.5 if norm else 0.0
        return LayerLoss(
            layer.name,
            shared.format,
            rms,
            max(piece.worst for piece in pieces),
            spec.shared.nbytes(spec.hidden),
            sum(piece.nbytes for piece in pieces),
        )


def _block_norms(matrix: Tensor) -> Tensor:
    columns = matrix.shape[-1]
    padded = torch.nn.functional.pad(matrix, (0, -columns % mxfp4.GROUP))
    norms: Tensor = torch.linalg.vector_norm(padded.reshape(*padded.shape[:-1], -1, mxfp4.GROUP), dim=-1)
    return norms


def _write_shards(
    headers: Headers, root: Path, folder: Path, quantizer: _Quantizer, progress: Callable[[str], None]
) -> dict[str, str]:
    weight_map: dict[str, str] = {}
    for shard in sorted({header.shard for header in headers.tensors.values()}):
        entries, metadata = read_shard(root / shard)
        outgoing = [tensor for entry in entries for tensor in quantizer.outgoing(entry, root / shard)]
        write_shard(folder / shard, outgoing, metadata)
        weight_map |= {tensor.name: shard for tensor in outgoing}
        progress(shard)
    return weight_map


def _write_json(path: Path, content: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.unfinished")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
