"""Grouped matrix products over stored weights, one expert upcast at a time."""

from __future__ import annotations

from functools import cache, cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor, blocks, e2m1

if TYPE_CHECKING:
    from collections.abc import Iterator


@cache
def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """``[256, 2]``: both numbers of a byte of E2M1 codes."""
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    return e2m1.decode(e2m1.unpack(codes[:, None]), dtype)


def upcast(tensor: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """``[N, K]`` stored to ``[N, K]`` numbers.

    The same numbers as :meth:`QuantizedTensor.dequantize`, faster: a table look-up a byte, and scales that broadcast
    over their blocks instead of being repeated.
    """
    if tensor.scales is None:
        return tensor.values.to(dtype)
    rows, columns = tensor.shape
    if tensor.format.packed:
        index = e2m1.as_bytes(tensor.values).to(torch.int32).flatten()
        plain = _pairs(tensor.device, dtype).index_select(0, index).view(rows, columns)
    else:
        plain = tensor.values.to(dtype)
    scales = tensor.scale_values(torch.float32).to(dtype)
    bn, bk = tensor.block
    if rows % bn or columns % bk:
        return plain * blocks.expand(scales, rows, columns, tensor.block)
    grid = plain.view(rows // bn, bn, columns // bk, bk)
    return grid.mul_(scales[:, None, :, None]).view(rows, columns)


_COPY_UP_TO = 64
"""Rows from which transposing a result costs a CPU more than multiplying in columns saves."""


_GROUPED_FROM = 16
"""Rows an expert, on average, from which a CPU's grouped product is ahead of one product an expert."""


class Groups:
    """How many rows each expert has, of rows sorted by expert.

    Args:
        counts: ``[E]`` int64.
    """

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    @classmethod
    def one(cls, rows: int) -> Groups:
        """A single expert with all the rows."""
        return cls(torch.tensor([rows]))

    @cached_property
    def ends(self) -> Tensor:
        """``[E]`` int32, where each expert's rows end."""
        return self.counts.cumsum(0).to(torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The counts, on the host."""
        sizes: list[int] = self.counts.tolist()
        return sizes

    def ranges(self) -> Iterator[tuple[int, slice]]:
        """Every expert that has rows, and which."""
        start = 0
        for expert, count in enumerate(self.sizes):
            if count:
                yield expert, slice(start, start + count)
                start += count


def grouped_linear(x: Tensor, groups: Groups, weights: QuantizedTensor) -> Tensor:
    """``x[rows of e] @ weights[e].T`` for every expert e.

    Args:
        x: ``[T, K]``, rows sorted by expert.
        groups: rows of each expert; they sum to T.
        weights: ``[E, N, K]`` as stored.

    Returns:
        ``[T, N]`` in x's dtype.
    """
    if len(groups.counts) == 1:
        return _one(x, upcast(weights[0], x.dtype))
    half = weights.values.dtype == x.dtype and weights.format is Format.BF16 and x.dtype != torch.float32
    few = len(x) < _GROUPED_FROM * len(groups.counts)
    if half and x.device.type == "cpu" and (few or x.dtype != torch.bfloat16):
        return _half_on_cpu(x, groups, weights.values)
    if half and x.dtype == torch.bfloat16:
        return torch.nn.functional.grouped_mm(x, weights.values.transpose(-2, -1), offs=groups.ends)
    out = torch.empty(len(x), weights.shape[-2], dtype=x.dtype, device=x.device)
    for expert, rows in groups.ranges():
        torch.mm(x[rows], upcast(weights[expert], x.dtype).t(), out=out[rows])
    return out


def _one(x: Tensor, matrix: Tensor) -> Tensor:
    """``[T, K]`` times ``[N, K]``, transposed; the result's memory may lie in columns."""
    if x.device.type == "cpu" and len(x) == 1:
        return torch.mv(matrix, x[0])[None]
    # Tokens as columns leave the weights, the larger operand, as they lie: 0.53 ms instead of 0.72 for 256 rows.
    return torch.mm(matrix, x.t()).t() if len(x) > 1 else torch.mm(x, matrix.t())


def _half_on_cpu(x: Tensor, groups: Groups, matrices: Tensor) -> Tensor:
    """Half-precision weights as stored. The library packs its right operand anew in every call: let that be x.

    One expert of [1024, 1024] on one core: 0.21 ms instead of 0.30 for 2 rows, 0.29 instead of 0.33 for 24 with the
    copy; a single row is a matrix-vector product, 0.11 ms instead of 0.17 for [1024, 512].
    """
    out = torch.empty(len(x), matrices.shape[-2], dtype=x.dtype)
    for expert, rows in groups.ranges():
        count = rows.stop - rows.start
        if count == 1:
            torch.mv(matrices[expert], x[rows.start], out=out[rows.start])
        elif count < _COPY_UP_TO:
            out[rows] = torch.mm(matrices[expert], x[rows].t()).t()
        else:
            torch.mm(x[rows], matrices[expert].t(), out=out[rows])
    return out
