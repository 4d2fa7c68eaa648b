"""A layer's tensors from its shards, one expert at a time into storage that is allocated once.

Shards are mapped, not read whole: an expert's bytes are touched when they are copied, and nothing else is.
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from foldmoe.checkpoint.families import Matrix, Slot
from foldmoe.checkpoint.shards import CheckpointError
from foldmoe.formats import QuantizedTensor, refuse_nan
from foldmoe.formats.blocks import plain_bytes
from foldmoe.formats.cutting import regrid
from foldmoe.moe.spec import Placement
from foldmoe.moe.weights import ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from types import TracebackType

    from foldmoe.checkpoint.headers import Headers
    from foldmoe.checkpoint.specs import MoELayer
    from foldmoe.checkpoint.stored import StoredSet


class LayerTensors(NamedTuple):
    """What one rank holds of a layer.

    Args:
        routed: its routed experts, cut to its part of the width.
        shared: the shared expert, cut alike, or None.
        router: router tensors by role (``weight``, ``bias``, ``table``, ``shared_gate``, ...), whole.
    """

    routed: ExpertWeights
    shared: ExpertWeights | None
    router: dict[str, Tensor]


class TensorReader:
    """Tensors of a local checkpoint by name; use as a context manager.

    Raises:
        CheckpointError: for a hub repository, whose weights are not here.
    """

    def __init__(self, headers: Headers) -> None:
        if headers.root is None:
            raise CheckpointError(f"{headers.source}: headers only; download the repository to read its weights")
        self._headers, self._root = headers, headers.root
        self._open: dict[str, safe_open] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    def tensor(self, name: str) -> Tensor:
        """The stored tensor, mapped from its shard.

        Raises:
            CheckpointError: a shard that changed or was cut short since its header was read.
        """
        shard = self._headers.tensors[name].shard
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(str(self._root / shard), framework="pt")
            found = self._open[shard].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{shard}: cannot read {name}: {error}; download or write it again") from error
        assert isinstance(found, Tensor)
        return found


def read_layer(
    headers: Headers, layer: MoELayer, placement: Placement | None = None, *, device: torch.device | str = "cpu"
) -> LayerTensors:
    """One rank's part of a layer on ``device``. Above the result's own bytes at most two experts are alive.

    Raises:
        CheckpointError: tensors missing, unexpected or of another shape, all in one error; a damaged shard.
        ValueError: a NaN or Inf, by tensor name and index; a width that does not cut into ``tp_size`` parts.
    """
    placement = placement or Placement()
    layer.audit.require(layer.name)
    with TensorReader(headers) as reader:
        routed = _stack(reader, layer, placement, device)
        shared = None
        if layer.audit.shared is not None:
            part = _expert(reader, layer.block.shared, layer.audit.shared, None)
            part = part.shard(placement.tp_rank, placement.tp_size)
            shared = _room(part, 1, device)
            _copy(shared, 0, part)
        router = {role: reader.tensor(name).to(device, copy=True) for role, name in layer.block.router.items()}
    return LayerTensors(routed, shared, router)


def iter_experts(reader: TensorReader, layer: MoELayer, experts: Iterable[int]) -> Iterator[tuple[int, ExpertWeights]]:
    """Routed experts one by one, each a set of one ``[1, 2I, H]``, ``[1, H, I]``, from single names and stacks alike.

    Raises:
        ValueError: a NaN or Inf.
    """
    stored = layer.audit.require(layer.name)
    for expert in experts:
        if layer.block.stacked:
            yield expert, _expert(reader, layer.block.stacked, stored, expert)
        else:
            yield expert, _expert(reader, layer.block.experts[expert], stored, None)


def _stack(reader: TensorReader, layer: MoELayer, placement: Placement, device: torch.device | str) -> ExpertWeights:
    held = placement.experts(layer.audit.count)
    result: ExpertWeights | None = None
    for expert, whole in iter_experts(reader, layer, held or range(1)):
        part = whole.shard(placement.tp_rank, placement.tp_size)
        del whole
        if result is None:
            result = _room(part, len(held), device)
        if held:
            _copy(result, expert - held.start, part)
        del part
    assert result is not None
    return result


def _expert(reader: TensorReader, names: Mapping[Slot, str], stored: StoredSet, index: int | None) -> ExpertWeights:
    """One expert from its own tensors, or entry ``index`` of a stack."""

    def read(matrix: Matrix) -> QuantizedTensor:
        return stored_matrix(reader, names, matrix, stored, index)

    down = read("down")
    if stored.gate_up is not None:
        gate_up = read("gate_up")
        return ExpertWeights(regrid(gate_up, (gcd(gate_up.block[0], stored.width), gate_up.block[1])), down)
    return ExpertWeights.from_parts(read("gate"), read("up"), down)


def stored_matrix(
    reader: TensorReader, names: Mapping[Slot, str], matrix: Matrix, stored: StoredSet, index: int | None = None
) -> QuantizedTensor:
    """One projection ``[1, N, K]`` as stored.

    Args:
        names: of the expert's own tensors, or of a stack's.
        stored: facts of the set; all its experts agree in them.
        index: entry of a stack; None for an expert of its own.

    Raises:
        ValueError: a NaN or Inf, by tensor name and index.
    """

    def read(kind: str) -> Tensor | None:
        name = names.get(Slot(matrix, kind))
        if name is None:
            return None
        tensor = reader.tensor(name)
        return tensor if index is None else tensor[index]

    values, global_scale = read("values"), read("global_scale")
    assert values is not None
    found = QuantizedTensor(
        values,
        read("scales"),
        format=stored.format,
        global_scale=None if global_scale is None else global_scale.reshape(()),
    )
    at = "" if index is None else f" of expert {index}"
    scales = names.get(Slot(matrix, "scales"))
    refuse_nan(found, f"{names[Slot(matrix, 'values')]}{at}", None if scales is None else f"{scales}{at}")
    return found.map(lambda tensor: tensor[None])


def _room(like: ExpertWeights, count: int, device: torch.device | str) -> ExpertWeights:
    """Storage for ``count`` experts such as ``like``, which is a set of one."""

    def empty(tensor: Tensor) -> Tensor:
        return torch.empty((count, *tensor.shape[1:]), dtype=tensor.dtype, device=device)

    return ExpertWeights(like.gate_up.map(empty), like.down.map(empty))


def _copy(into: ExpertWeights, at: int, one: ExpertWeights) -> None:
    for target, source in ((into.gate_up, one.gate_up), (into.down, one.down)):
        stored = source.tensors()
        for role, tensor in target.tensors().items():
            plain_bytes(tensor)[at].copy_(plain_bytes(stored[role])[0])
