"""Block-FP8 experts in the kernel's layout and back, bit for bit; rows and units as in ``pack.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foldmoe.backends.base import Unsupported
from foldmoe.backends.hopper.pack import Packed, padded, row_order
from foldmoe.backends.hopper.units import from_units, to_units


@dataclass
class PackedFp8(Packed):
    """Block-FP8 matrices in kernel layout, expert after expert.

    Args:
        values: ``[units * 64, 128]`` float8_e4m3fn.
        scales: ``[units * groups, 8]`` float32: by unit, column group and 8 rows.
        stored_scales: as they came (they are few).
        shape: stored (experts, rows, columns). block: rows and columns a scale. groups: column groups a step, 1 or 4.
        interleaved: gate and up rows.
    """

    values: Tensor
    scales: Tensor
    stored_scales: Tensor
    shape: tuple[int, int, int]
    block: tuple[int, int]
    groups: int
    interleaved: bool

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.stored_scales.nbytes

    @property
    def factors(self) -> Tensor:
        """What sums are multiplied by, for the kernel."""
        return self.scales


def scale_groups(*columns: int) -> int:
    """FP8 scales a step of 128 columns, where a scale spans ``columns`` (of all projections together)."""
    return 1 if all(span % 128 == 0 for span in columns) else 4


def check_fp8_block(scales: Tensor, block: tuple[int, int], *, name: str = "weights") -> None:
    """Whether the layout expresses float32 multipliers ``scales`` of ``block``s.

    Raises:
        ValueError: a block that it cannot express, or a NaN scale.
        Unsupported: scales whose products leave float32's normal range.
    """
    if block[0] % 8 or block[1] % 32:
        raise ValueError(f"{name}: scale blocks of {block[0]}x{block[1]}; rows must be a multiple of 8, columns of 32")
    if scales.numel() and not bool(((scales > 2.0**-100) & (scales < 2.0**100)).all()):
        if nan := int(scales.isnan().sum()):
            raise ValueError(f"{name}: {nan} scales are NaN")
        low, high = (float(end) for end in scales.aminmax())
        raise Unsupported(f"{name}: a scale lies outside 2**-100 .. 2**100: they reach from {low:g} to {high:g}")


def pack_fp8_block(
    values: Tensor,
    scales: Tensor,
    gate_up_interleave: bool,
    *,
    block: tuple[int, int],
    stored_scales: Tensor | None = None,
    groups: int | None = None,
    consume: bool = False,
    name: str = "weights",
) -> PackedFp8:
    """Pack ``values [E, N, K]`` (E4M3) with float32 multipliers ``scales [E, ceil(N/bn), ceil(K/bk)]``.

    Args:
        block: (bn, bk); bn a multiple of 8, bk of 32.
        stored_scales: the scale tensor to give back on unpacking; default ``scales``.
        groups: scales a step of 128 columns, 1 or 4; default the fewest that express ``block``.
        consume: write the result over ``values`` where sizes allow; the caller gives them up.

    Raises:
        ValueError, Unsupported: see :func:`check_fp8_block`.
    """
    check_fp8_block(scales, block, name=name)
    experts, rows, columns = values.shape
    groups = groups or scale_groups(block[1])
    order = row_order(rows, gate_up_interleave, values.device)
    units = to_units(values.view(torch.uint8), padded(columns), gate_up_interleave, consume=consume)
    return PackedFp8(
        units.view(torch.float8_e4m3fn),
        _unit_scales(scales, order[::8], block, padded(columns) // 128, groups),
        stored_scales if stored_scales is not None else scales,
        (experts, rows, columns),
        block,
        groups,
        gate_up_interleave,
    )


def _unit_scales(scales: Tensor, rows: Tensor, block: tuple[int, int], steps: int, groups: int) -> Tensor:
    """Scales of every eighth packed row ``rows`` and column group, in the order of units ``[units * groups, 8]``."""
    column = torch.arange(steps * groups, device=scales.device) * (128 // groups)
    at_row = (rows // block[0]).clamp(max=scales.shape[1] - 1)
    at_column = (column // block[1]).clamp(max=scales.shape[2] - 1)
    grid = scales.to(torch.float32)[:, at_row][:, :, at_column]  # expert, row group, column group
    return grid.view(scales.shape[0], -1, 4, 8, steps, groups).permute(0, 1, 4, 2, 5, 3).reshape(-1, 8)


def unpack_fp8_block(packed: PackedFp8) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`pack_fp8_block`: values ``[E, N, K]``, a new tensor, and the stored scales."""
    values = from_units(packed.values.view(torch.uint8), packed.shape, packed.interleaved)
    return values.view(torch.float8_e4m3fn), packed.stored_scales
