"""One set of experts of equal width, as stored."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING, Literal

from foldmoe.formats.cutting import cut, regrid, stack_rows
from foldmoe.formats.padding import pad_intermediate, unpad_intermediate

if TYPE_CHECKING:
    import torch

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

        Where I is no multiple of the scale block, the scales move to the coarsest grid that fits, which changes no
        value.

        Raises:
            ValueError: if gate and up differ in shape or storage.
        """
        gate, up = (regrid(part, (gcd(part.block[0], part.shape[-2]), part.block[1])) for part in (gate, up))
        return cls(stack_rows(gate, up), down)

    @classmethod
    def from_stacked(
        cls, stacked: QuantizedTensor, down: QuantizedTensor, *, order: Literal["gate_up", "up_gate"]
    ) -> ExpertWeights:
        """A stack whose halves are in the stated order; nothing in the numbers tells gate from up.

        A scale block that reaches over the boundary between the halves is split, which changes no value.

        Raises:
            ValueError: another order, or shapes that do not belong together.
        """
        if order not in ("gate_up", "up_gate"):
            raise ValueError(f"order must be 'gate_up' or 'up_gate', found {order!r}")
        width = down.shape[-1]
        stacked = regrid(stacked, (gcd(stacked.block[0], width), stacked.block[1]))
        if order == "gate_up":
            return cls(stacked, down)
        first, second = (cut(stacked, -2, start, width) for start in (0, width))
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
        return cut(self.gate_up, -2, 0, self.width), cut(self.gate_up, -2, self.width, self.width)

    def padded(self, width: int) -> ExpertWeights:
        """The same layer, I widened with zeros (see :func:`foldmoe.formats.pad_intermediate`)."""
        return ExpertWeights(*pad_intermediate(self.gate_up, self.down, width))

    def unpadded(self, width: int) -> ExpertWeights:
        """Inverse of :meth:`padded`, bit for bit."""
        return ExpertWeights(*unpad_intermediate(self.gate_up, self.down, width))

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
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} of {size} ranks; the first is rank 0")
        gate, up = (cut(half, -2, rank * part, part) for half in self.gate_and_up())
        return ExpertWeights.from_parts(gate, up, cut(self.down, -1, rank * part, part))
