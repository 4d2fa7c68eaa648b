"""One set of experts of equal width, as stored."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from foldmoe.formats import blocks
from foldmoe.formats.padding import pad_intermediate

if TYPE_CHECKING:
    from collections.abc import Callable

    from foldmoe.formats.tensor import Format, QuantizedTensor


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Routed experts, or a shared expert (a set of one).

    Args:
        gate_up: ``[E, 2I, H]``; rows 0..I-1 gate, then up.
        down: ``[E, H, I]``.

    Raises:
        ValueError: shapes that do not belong together.
    """

    gate_up: QuantizedTensor
    down: QuantizedTensor

    def __post_init__(self) -> None:
        up, down = self.gate_up.shape, self.down.shape
        if len(up) != 3 or len(down) != 3 or up[0] != down[0] or up[1] != 2 * down[2] or up[2] != down[1]:
            raise ValueError(
                f"gate_up {list(up)} and down {list(down)} do not belong together; expected [E, 2I, H] and [E, H, I]"
            )
        if self.gate_up.format is not self.down.format:
            raise ValueError(
                f"gate_up is {self.gate_up.format.value} but down is {self.down.format.value}; one set has one format"
            )
        if self.width % self.gate_up.block[0]:
            raise ValueError(
                f"the gate/up boundary at row {self.width} cuts a {self.gate_up.block[0]}-row scale block; "
                "build the set with ExpertWeights.from_parts, which refines the scale grid exactly"
            )

    @classmethod
    def from_parts(cls, gate: QuantizedTensor, up: QuantizedTensor, down: QuantizedTensor) -> ExpertWeights:
        """Stack separately stored gate, up ``[E, I, H]`` and down ``[E, H, I]``.

        Where I is no multiple of the scale block, the scales move to the finest common grid, which changes no value.
        """
        rows, _columns = gate.shape[-2:]
        if gate.shape != up.shape:
            raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)} must have one shape")
        block = (gcd(gate.block[0], rows), gate.block[1])
        parts = [_regrid(part, block) for part in (gate, up)]

        def stack(role: Callable[[QuantizedTensor], Tensor | None]) -> Tensor | None:
            tensors = [role(part) for part in parts]
            if tensors[0] is None or tensors[1] is None:
                return None
            return _cat_rows(tensors[0], tensors[1])

        values = stack(lambda p: p.values)
        assert values is not None
        gate_up = replace(parts[0], values=values, scales=stack(lambda p: p.scales))
        return cls(gate_up, down)

    @classmethod
    def from_stacked(
        cls, stacked: QuantizedTensor, down: QuantizedTensor, *, order: Literal["gate_up", "up_gate"]
    ) -> ExpertWeights:
        """A stack whose halves are in the stated order; nothing in the numbers tells gate from up."""
        if order == "gate_up":
            return cls(stacked, down)
        if order != "up_gate":
            raise ValueError(f"order must be 'gate_up' or 'up_gate', found {order!r}")
        first, second = (stacked.map(lambda t, h=half: t.chunk(2, dim=-2)[h] if t.dim() > 2 else t) for half in (0, 1))
        return cls.from_parts(second, first, down)

    @property
    def num_experts(self) -> int:
        return self.down.shape[0]

    @property
    def hidden(self) -> int:
        """H."""
        return self.down.shape[1]

    @property
    def width(self) -> int:
        """I, the intermediate width."""
        return self.down.shape[2]

    @property
    def format(self) -> Format:
        return self.down.format

    @property
    def nbytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes

    @property
    def device(self) -> torch.device:
        return self.down.device

    def __getitem__(self, experts: slice) -> ExpertWeights:
        """A range of experts; a view."""
        return ExpertWeights(self.gate_up[experts], self.down[experts])

    def to(self, device: torch.device | str) -> ExpertWeights:
        return ExpertWeights(self.gate_up.to(device), self.down.to(device))

    def gate_and_up(self) -> tuple[QuantizedTensor, QuantizedTensor]:
        """The two halves ``[E, I, H]``, views."""

        def half(index: int) -> QuantizedTensor:
            return self.gate_up.map(lambda t: t.chunk(2, dim=-2)[index] if t.dim() > 2 else t)

        return half(0), half(1)

    def padded(self, width: int) -> ExpertWeights:
        """The same layer, I widened with zeros (see :func:`foldmoe.formats.pad_intermediate`)."""
        return ExpertWeights(*pad_intermediate(self.gate_up, self.down, width))

    def shard(self, rank: int, size: int) -> ExpertWeights:
        """This tensor-parallel rank's slice of the width: gate and up rows, down columns; scales regridded exactly.

        Raises:
            ValueError: if the width does not divide into ``size`` parts of whole bytes.
        """
        if size == 1:
            return self
        part = self.width // size
        if self.width % size or (self.format.packed and part % 2):
            raise ValueError(f"a width of {self.width} does not cut into {size} equal {self.format.value} shards")
        gate, up = (_slice(half, -2, rank * part, part) for half in self.gate_and_up())
        return ExpertWeights.from_parts(gate, up, _slice(self.down, -1, rank * part, part))


def _regrid(tensor: QuantizedTensor, block: blocks.Block) -> QuantizedTensor:
    if tensor.scales is None or block == tensor.block:
        return tensor
    rows, columns = tensor.shape[-2:]
    scales = tensor.scales
    plain = scales.view(torch.uint8) if scales.element_size() == 1 else scales
    fine = blocks.regrid(plain, rows, columns, tensor.block, block).contiguous().view(scales.dtype)
    return replace(tensor, scales=fine, block=block)


def _slice(tensor: QuantizedTensor, dim: Literal[-2, -1], start: int, length: int) -> QuantizedTensor:
    """A cut along rows (-2) or columns (-1), on the finest scale grid that the cut needs."""
    block = list(tensor.block)
    block[dim] = gcd(block[dim], start, length) if tensor.scales is not None else block[dim]
    fine = _regrid(tensor, (block[0], block[1]))
    halves = 2 if dim == -1 and tensor.format.packed else 1
    values = fine.values.narrow(dim, start // halves, length // halves)
    scales = fine.scales
    if scales is not None:
        scales = scales.narrow(dim, start // block[dim], -(-length // block[dim]))
    return replace(fine, values=values, scales=scales)


def _cat_rows(first: Tensor, second: Tensor) -> Tensor:
    if first.element_size() > 1:
        return torch.cat((first, second), dim=-2)
    joined = torch.cat((first.view(torch.uint8), second.view(torch.uint8)), dim=-2)
    return joined.view(first.dtype)
