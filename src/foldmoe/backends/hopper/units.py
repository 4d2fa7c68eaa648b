"""Rows of bytes to units of 64 rows x 128 bytes and back: what FP8 and bf16 weights have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn.functional import pad

from foldmoe.backends.hopper.pack import in_place, pick_rows, row_blocks, row_order

if TYPE_CHECKING:
    from torch import Tensor


def to_units(stored: Tensor, width: int, interleaved: bool, *, consume: bool = False) -> Tensor:
    """``[E, N, B]`` bytes to ``[E * units * 64, 128]``: blocks of 256 rows, in each step after step.

    Args:
        width: B rounded up to whole steps; zeros follow the stored bytes.
        interleaved: gate and up rows, see ``pack.row_order``.
        consume: write the result over ``stored`` where sizes allow; the caller gives it up.
    """
    experts, rows, size = stored.shape
    blocks, steps = row_blocks(rows), width // 128
    order = row_order(rows, interleaved, stored.device)
    reuse = consume and rows * size == blocks * 256 * width and in_place(stored)
    out = stored if reuse else stored.new_empty(experts, blocks * 256, width)
    for e in range(experts):
        wide = pad(stored[e], (0, width - size)) if width != size else stored[e]
        tiles = pick_rows(wide, order, rows).view(blocks, 256, steps, 128).transpose(1, 2)
        out[e].view(blocks, steps, 256, 128).copy_(tiles)
    return out.view(-1, 128)


def from_units(units: Tensor, shape: tuple[int, int, int], interleaved: bool) -> Tensor:
    """Inverse of :func:`to_units`: ``[E, N, B]`` bytes of that ``shape``, a new tensor."""
    experts, rows, size = shape
    blocks = row_blocks(rows)
    tiles = units.view(experts, blocks, -1, 256, 128)
    order = row_order(rows, interleaved, units.device)
    keep = order < rows
    stored = units.new_empty(shape)
    for e in range(experts):
        plain = tiles[e].transpose(1, 2).reshape(blocks * 256, -1)[:, :size]
        stored[e, order[keep]] = plain[keep]
    return stored
