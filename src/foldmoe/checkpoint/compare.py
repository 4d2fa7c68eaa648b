"""A derived checkpoint against the one it came from: the same experts, bit for bit or requantised, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from foldmoe.checkpoint.families import Block, Matrix, Slot
from foldmoe.checkpoint.headers import Headers, read_headers
from foldmoe.checkpoint.reader import TensorReader, stored_matrix
from foldmoe.checkpoint.specs import MoELayer, read_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from foldmoe.checkpoint.stored import StoredSet
    from foldmoe.formats import QuantizedTensor

REQUANTIZED_RMS = 0.2
"""Requantising to 4 bits costs about 12 % RMS; more than this is another matrix."""

GAIN = 0.05
"""<new, old> / <old, old> lies within 1 +- this: the least-squares exponent shrinks weights by about 3 %."""

MATRICES: tuple[Matrix, ...] = ("gate", "up", "gate_up", "down")


@dataclass(frozen=True)
class LayerDifference:
    """One layer of the derived checkpoint against the original's.

    Args:
        routed, shared: "equal", "requantised", "different" or "absent".
        rms: ||new - old|| / ||old|| of the shared expert's weights, of its worst projection.
        gain: <new, old> / <old, old> of that projection: 0.4 where a shared expert was scaled by 0.4.
        problems: why the layer fails; empty if it passes.
    """

    layer: str
    routed: str = "absent"
    shared: str = "absent"
    rms: float = 0.0
    gain: float = 1.0
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True)
class _Verdict:
    """One projection, or the worst of a set's."""

    kind: str
    rms: float = 0.0
    gain: float = 1.0
    problem: str | None = None


def compare(derived: str | Path, original: str | Path) -> Iterator[LayerDifference]:
    """Compare every MoE layer that either checkpoint has, one result a layer.

    Raises:
        CheckpointError: a checkpoint that cannot be read at all.
    """
    headers, truth = read_headers(derived), read_headers(original)
    mine = {layer.name: layer for layer in read_layers(headers)}
    theirs = {layer.name: layer for layer in read_layers(truth)}
    for name in dict.fromkeys((*theirs, *mine)):
        if name not in mine or name not in theirs:
            where = "derived" if name not in mine else "original"
            yield LayerDifference(name, problems=(f"the {where} checkpoint does not have this layer",))
        else:
            yield _layer(headers, mine[name], truth, theirs[name])


def _layer(headers: Headers, mine: MoELayer, truth: Headers, theirs: MoELayer) -> LayerDifference:
    both = (("derived", mine), ("original", theirs))
    unread = [f"{which}: {line}" for which, layer in both for line in layer.audit.problems]
    if unread or mine.audit.routed is None or theirs.audit.routed is None:
        return LayerDifference(mine.name, problems=tuple(unread))
    if mine.audit.count != theirs.audit.count or (mine.audit.shared is None) != (theirs.audit.shared is None):
        return LayerDifference(mine.name, problems=("the two checkpoints do not have the same experts",))
    if bool(mine.block.stacked) != bool(theirs.block.stacked):
        return LayerDifference(mine.name, problems=("one checkpoint stacks its experts, the other does not",))
    with TensorReader(headers) as left, TensorReader(truth) as right:
        routed = _worst(
            _set((left, ours, mine.audit.routed), (right, original, theirs.audit.routed), index)
            for ours, original, index in _experts(mine.block, theirs.block, mine.audit.count)
        )
        shared = _Verdict("absent")
        if mine.audit.shared is not None and theirs.audit.shared is not None:
            shared = _set(
                (left, mine.block.shared, mine.audit.shared), (right, theirs.block.shared, theirs.audit.shared), None
            )
    problems = tuple(v.problem for v in (routed, shared) if v.problem)
    return LayerDifference(mine.name, routed.kind, shared.kind, shared.rms, shared.gain, problems)


def _experts(
    mine: Block, theirs: Block, count: int
) -> Iterator[tuple[Mapping[Slot, str], Mapping[Slot, str], int | None]]:
    """Names of each expert in both checkpoints, and its place in a stack."""
    if mine.stacked and theirs.stacked:
        for expert in range(count):
            yield mine.stacked, theirs.stacked, expert
    elif not mine.stacked and not theirs.stacked:
        for expert in range(count):
            yield mine.experts[expert], theirs.experts[expert], None


def _set(
    mine: tuple[TensorReader, Mapping[Slot, str], StoredSet],
    theirs: tuple[TensorReader, Mapping[Slot, str], StoredSet],
    index: int | None,
) -> _Verdict:
    """The worst of one expert's projections."""
    verdicts = []
    for matrix in MATRICES:
        slot = Slot(matrix, "values")
        if slot not in mine[1] and slot not in theirs[1]:
            continue
        if slot not in mine[1] or slot not in theirs[1]:
            return _Verdict("different", problem=f"{matrix} is stored apart in one checkpoint and stacked in the other")
        new = stored_matrix(mine[0], mine[1], matrix, mine[2], index)
        old = stored_matrix(theirs[0], theirs[1], matrix, theirs[2], index)
        verdicts.append(_matrix(mine[1][slot], new, old))
    return _worst(iter(verdicts))


def _matrix(name: str, new: QuantizedTensor, old: QuantizedTensor) -> _Verdict:
    if new.shape != old.shape:
        return _Verdict("different", problem=f"{name}: shape {list(new.shape)}, the original's is {list(old.shape)}")
    if new.format is old.format and _same_bytes(new, old):
        return _Verdict("equal")
    fresh, truth = (t.dequantize(torch.float32).to(torch.float64) for t in (new, old))
    norm = float(truth.square().sum())
    if norm == 0:
        rms, gain = float(fresh.norm()), 1.0
    else:
        rms, gain = float((fresh - truth).norm()) / norm**0.5, float((fresh * truth).sum()) / norm
    what = f"{name} ({new.format.value}, the original is {old.format.value}): RMS {rms:.3f}, gain {gain:.3f}"
    if new.format is old.format:
        return _Verdict("different", rms, gain, f"{what}; the same format must hold the same bytes")
    if not rms <= REQUANTIZED_RMS or abs(gain - 1) > GAIN:
        return _Verdict("different", rms, gain, f"{what}; more than requantising costs")
    return _Verdict("requantised", rms, gain)


def _same_bytes(new: QuantizedTensor, old: QuantizedTensor) -> bool:
    first, second = new.tensors(), old.tensors()
    return first.keys() == second.keys() and all(
        first[role].shape == second[role].shape and torch.equal(_bytes(first[role]), _bytes(second[role]))
        for role in first
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _worst(verdicts: Iterator[_Verdict]) -> _Verdict:
    order = {"different": 2, "requantised": 1, "equal": 0}
    return max(verdicts, key=lambda v: (order[v.kind], v.rms), default=_Verdict("absent"))
