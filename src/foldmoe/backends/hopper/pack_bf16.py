"""bf16 experts in the kernel's layout and back; rows and units as in ``pack.py``, but a step is 64 columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foldmoe.backends.base import Unsupported
from foldmoe.backends.hopper.pack import Packed, padded
from foldmoe.backends.hopper.units import from_units, to_units


@dataclass
class PackedBf16(Packed):
    """bf16 matrices in kernel layout, expert after expert.

    Args:
        values: ``[units * 64, 64]`` bfloat16.
        shape: stored (experts, rows, columns). interleaved: gate and up rows.
    """

    values: Tensor
    shape: tuple[int, int, int]
    interleaved: bool

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    @property
    def steps(self) -> int:
        """64-column steps, an even number: a hidden block has 128 columns."""
        return padded(self.shape[2]) // 64

    @property
    def factors(self) -> Tensor:
        """Never read: nothing multiplies the sums."""
        return self.values


def check_bf16(values: Tensor, *, name: str = "weights") -> None:
    """Whether the values are bf16, and a row's lie side by side.

    Raises:
        Unsupported: for other floats, which bf16 does not express, and for transposed views.
    """
    if values.dtype is not torch.bfloat16:
        raise Unsupported(
            f"{name}: values in {str(values.dtype).removeprefix('torch.')}; the launch multiplies bfloat16"
        )
    if values.stride(-1) != 1:
        raise Unsupported(f"{name}: a row's values lie {values.stride(-1)} apart; give the weights .contiguous()")


def pack_bf16(values: Tensor, gate_up_interleave: bool, *, consume: bool = False, name: str = "weights") -> PackedBf16:
    """Pack ``values [E, N, K]``.

    Args:
        consume: write the result over ``values`` where sizes allow; the caller gives them up.

    Raises:
        Unsupported: see :func:`check_bf16`.
    """
    check_bf16(values, name=name)
    experts, rows, columns = values.shape
    units = to_units(values.view(torch.uint8), 2 * padded(columns), gate_up_interleave, consume=consume)
    return PackedBf16(units.view(torch.bfloat16), (experts, rows, columns), gate_up_interleave)


def unpack_bf16(packed: PackedBf16) -> Tensor:
    """Inverse of :func:`pack_bf16`, a new tensor."""
    experts, rows, columns = packed.shape
    stored = from_units(packed.values.view(torch.uint8), (experts, rows, 2 * columns), packed.interleaved)
    return stored.view(torch.bfloat16)
