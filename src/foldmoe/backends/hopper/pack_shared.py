"""A block-FP8 shared expert in the kernel's layout and back, bit for bit; rows and units as in ``pack.py``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from foldmoe.backends.base import Unsupported
from foldmoe.backends.hopper.pack import padded, pick_rows, row_blocks, row_order


@dataclass
class PackedShared:
    """A block-FP8 expert's matrix in kernel layout.

    Args:
        values: ``[units * 64, 128]`` float8_e4m3fn.
        scales: ``[units * groups, 8]`` float32: by unit, column group and 8 rows.
        stored_scales: as they came (they are few).
        shape: stored (rows, columns). block: rows and columns a scale. groups: column groups a step, 1 or 4.
    """

    values: Tensor
    scales: Tensor
    stored_scales: Tensor
    shape: tuple[int, int]
    block: tuple[int, int]
    groups: int
    interleaved: bool

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes + self.stored_scales.nbytes

    @property
    def blocks(self) -> int:
        """256-row blocks."""
        return row_blocks(self.shape[0])

    @property
    def steps(self) -> int:
        """128-column steps."""
        return padded(self.shape[1]) // 128


def pack_fp8_block(
    values: Tensor,
    scales: Tensor,
    gate_up_interleave: bool,
    *,
    block: tuple[int, int],
    stored_scales: Tensor | None = None,
    groups: int | None = None,
    name: str = "weights",
) -> PackedShared:
    """Pack ``values [N, K]`` (E4M3) with float32 multipliers ``scales [ceil(N/bn), ceil(K/bk)]``.

    Args:
        block: (bn, bk); bn a multiple of 8, bk of 32.
        stored_scales: the scale tensor to give back on unpacking; default ``scales``.
        groups: scales a step of 128 columns, 1 or 4; default the fewest that express ``block``.

    Raises:
        ValueError: a block that the layout cannot express.
        Unsupported: scales whose products leave float32's normal range.
    """
    rows, columns = values.shape
    if block[0] % 8 or block[1] % 32:
        raise ValueError(f"{name}: scale blocks of {block[0]}x{block[1]}; rows must be a multiple of 8, columns of 32")
    if scales.numel() and not bool(((scales > 2.0**-100) & (scales < 2.0**100)).all()):
        raise Unsupported(f"{name}: a scale lies outside 2**-100 .. 2**100")
    groups = groups or (1 if block[1] % 128 == 0 else 4)
    blocks, steps = row_blocks(rows), padded(columns) // 128
    device = values.device
    order = row_order(rows, gate_up_interleave, device)
    wide = pad(values.view(torch.uint8), (0, steps * 128 - columns))
    tiles = torch.empty(blocks, steps, 256, 128, dtype=torch.uint8, device=device)
    for b in range(blocks):
        tiles[b] = pick_rows(wide, order[b * 256 : (b + 1) * 256], rows).view(256, steps, 128).transpose(0, 1)
    column = torch.arange(steps * groups, device=device) * (128 // groups)
    row = order[::8]
    at_row = (row // block[0]).clamp(max=scales.shape[0] - 1)
    at_column = (column // block[1]).clamp(max=scales.shape[1] - 1)
    grid = scales.to(torch.float32)[at_row][:, at_column]  # row group, column group
    grid = grid.view(blocks, 4, 8, steps, groups).permute(0, 3, 1, 4, 2).contiguous()  # b kb wg group 8
    return PackedShared(
        tiles.view(-1, 128).view(torch.float8_e4m3fn),
        grid.view(-1, 8),
        stored_scales if stored_scales is not None else scales,
        (rows, columns),
        block,
        groups,
        gate_up_interleave,
    )


def unpack_fp8_block(packed: PackedShared) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`pack_fp8_block`: values ``[N, K]`` and the stored scales."""
    rows, columns = packed.shape
    device = packed.values.device
    order = row_order(rows, packed.interleaved, device)
    keep = order < rows
    tiles = packed.values.view(torch.uint8).view(packed.blocks, packed.steps, 256, 128)
    values = torch.empty(rows, columns, dtype=torch.uint8, device=device)
    for b in range(packed.blocks):
        part = slice(b * 256, (b + 1) * 256)
        plain = tiles[b].transpose(0, 1).reshape(256, packed.steps * 128)[:, :columns]
        values[order[part][keep[part]]] = plain[keep[part]]
    return values.view(torch.float8_e4m3fn), packed.stored_scales
