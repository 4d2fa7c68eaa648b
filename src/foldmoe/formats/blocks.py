"""Block scales: which scale belongs to which element, with a last block that may be short."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

Block = tuple[int, int]


def scale_shape(rows: int, columns: int, block: Block) -> tuple[int, int]:
    """Scales that an ``[rows, columns]`` matrix needs with ``block`` = (rows, columns) a scale."""
    return -(-rows // block[0]), -(-columns // block[1])


def expand(scales: Tensor, rows: int, columns: int, block: Block) -> Tensor:
    """Scales ``[..., ceil(rows/bn), ceil(columns/bk)]`` to one per element ``[..., rows, columns]``."""
    if block[0] > 1:
        scales = scales.repeat_interleave(block[0], dim=-2)
    if block[1] > 1:
        scales = scales.repeat_interleave(block[1], dim=-1)
    return scales[..., :rows, :columns]


def groups(matrix: Tensor, size: int) -> Tensor:
    """``[..., K]`` as ``[..., ceil(K/size), size]``; a short last group is filled with zeros."""
    count = -(-matrix.shape[-1] // size)
    return torch.unflatten(pad(matrix, (0, count * size - matrix.shape[-1])), -1, (count, size))


def plain_bytes(tensor: Tensor) -> Tensor:
    """One-byte dtypes as uint8, others as they are: torch does not pad, repeat, copy or concatenate all of them."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def regrid(scales: Tensor, rows: int, columns: int, old: Block, new: Block) -> Tensor:
    """The same scales on a finer grid: exact, since every new block lies in one old block.

    Raises:
        ValueError: if ``new`` does not divide ``old``.
    """
    if old[0] % new[0] or old[1] % new[1]:
        raise ValueError(f"block {new} does not divide block {old}: a new block would straddle two scales")
    for dim, (n, coarse, fine) in enumerate(((rows, old[0], new[0]), (columns, old[1], new[1])), start=-2):
        if coarse != fine:
            scales = scales.repeat_interleave(coarse // fine, dim=dim).narrow(dim, 0, -(-n // fine))
    return scales
