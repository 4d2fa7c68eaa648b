"""The inverse of the reader: stacked weights back to the checkpoint's own tensors, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.checkpoint.families import Matrix, Slot
from foldmoe.formats.cutting import cut, regrid
from foldmoe.moe.spec import Placement

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foldmoe.checkpoint.specs import MoELayer
    from foldmoe.checkpoint.stored import StoredMatrix, StoredSet
    from foldmoe.formats import QuantizedTensor
    from foldmoe.formats.blocks import Block as ScaleBlock
    from foldmoe.moe.weights import ExpertWeights


def layer_tensors(
    layer: MoELayer, routed: ExpertWeights, shared: ExpertWeights | None, *, placement: Placement | None = None
) -> dict[str, Tensor]:
    """Names and tensors of one rank's experts, as the file has them.

    With one rank every tensor equals the file's in dtype, shape and bytes. With tensor parallelism a tensor is this
    rank's cut, its scales on the grid that the cut needed; with expert parallelism a stacked tensor holds this rank's
    experts.

    Raises:
        CheckpointError: if the layer's own tensors do not belong together.
        ValueError: weights whose scales the file's grid cannot hold.
    """
    placement = placement or Placement()
    stored = layer.audit.require(layer.name)
    whole = placement.tp_size == 1
    found: dict[str, Tensor] = {}
    if layer.block.stacked:
        found |= _stacked(layer.block.stacked, stored, routed, whole)
    else:
        for row, expert in enumerate(placement.experts(layer.audit.count)):
            found |= _expert(layer.block.experts[expert], stored, routed, row, whole)
    if shared is not None and layer.audit.shared is not None:
        found |= _expert(layer.block.shared, layer.audit.shared, shared, 0, whole)
    return found


def _parts(
    stored: StoredSet, gate_up: QuantizedTensor, down: QuantizedTensor
) -> list[tuple[Matrix, StoredMatrix, QuantizedTensor]]:
    """Projections as the file separates them, of one expert or of a stack."""
    width = down.shape[-1]
    if stored.gate_up is not None:
        return [("gate_up", stored.gate_up, gate_up), ("down", stored.down, down)]
    assert stored.gate is not None
    assert stored.up is not None
    return [
        ("gate", stored.gate, cut(gate_up, -2, 0, width)),
        ("up", stored.up, cut(gate_up, -2, width, width)),
        ("down", stored.down, down),
    ]


def _expert(
    names: Mapping[Slot, str], stored: StoredSet, weights: ExpertWeights, row: int, whole: bool
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for matrix, file, part in _parts(stored, weights.gate_up[row], weights.down[row]):
        found |= _named(names, matrix, coarsen(part, file.format.block) if whole else part, file.global_shape)
    return found


def _stacked(names: Mapping[Slot, str], stored: StoredSet, weights: ExpertWeights, whole: bool) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for matrix, file, part in _parts(stored, weights.gate_up, weights.down):
        count = weights.num_experts
        shape = (count, *file.global_shape[1:])
        found |= _named(names, matrix, coarsen(part, file.format.block) if whole else part, shape)
    return found


def _named(
    names: Mapping[Slot, str], matrix: Matrix, part: QuantizedTensor, global_shape: tuple[int, ...]
) -> dict[str, Tensor]:
    tensors = part.tensors()
    if "global_scale" in tensors:
        tensors["global_scale"] = tensors["global_scale"].reshape(global_shape)
    return {names[Slot(matrix, role)]: tensor.contiguous() for role, tensor in tensors.items()}


def coarsen(tensor: QuantizedTensor, block: ScaleBlock) -> QuantizedTensor:
    """The same numbers with their scales on the coarser grid ``block``: the inverse of ``formats.cutting.regrid``.

    Raises:
        ValueError: if scales within one new block differ, so that the coarser grid cannot hold them.
    """
    if tensor.scales is None or tensor.block == block:
        return tensor
    rows, columns = (new // old for new, old in zip(block, tensor.block, strict=True))
    scales = tensor.scales[..., ::rows, ::columns].contiguous()
    coarse = replace(tensor, scales=scales, block=block)
    again = regrid(coarse, tensor.block).scales
    assert again is not None
    if not torch.equal(_bytes(again), _bytes(tensor.scales)):
        raise ValueError(f"scales differ within {block[0]}x{block[1]} blocks; the file's grid cannot hold them")
    return coarse


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
