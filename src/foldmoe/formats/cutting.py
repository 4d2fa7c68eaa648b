"""Cutting and joining stored matrices along rows or columns: scales go with their values, and no number changes."""

from __future__ import annotations

from dataclasses import replace
from math import gcd
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from foldmoe.formats import blocks
from foldmoe.formats.blocks import plain_bytes

if TYPE_CHECKING:
    from foldmoe.formats.tensor import QuantizedTensor


def regrid(tensor: QuantizedTensor, block: blocks.Block) -> QuantizedTensor:
    """The same numbers with their scales on the finer grid ``block``.

    Raises:
        ValueError: if ``block`` does not divide the tensor's own.
    """
    if tensor.scales is None or block == tensor.block:
        return tensor
    rows, columns = tensor.shape[-2:]
    fine = blocks.regrid(plain_bytes(tensor.scales), rows, columns, tensor.block, block)
    return replace(tensor, scales=fine.contiguous().view(tensor.scales.dtype), block=block)


def cut(tensor: QuantizedTensor, dim: Literal[-2, -1], start: int, length: int) -> QuantizedTensor:
    """``length`` rows (-2) or columns (-1) from ``start`` on, with scales on the coarsest grid that fits the cut.

    A view wherever the cut falls between blocks of scales.

    Raises:
        ValueError: if the cut leaves the matrix, halves a byte, or takes rows of two global scales.
    """
    if not 0 <= start <= start + length <= tensor.shape[dim]:
        raise ValueError(f"{start} .. {start + length} lies outside a dimension of {tensor.shape[dim]}")
    each = 2 if dim == -1 and tensor.format.packed else 1
    if start % each or length % each:
        raise ValueError(f"columns {start} .. {start + length} halve a byte of two {tensor.format.value} values")
    step = gcd(tensor.block[dim], start, length)
    fine = regrid(tensor, (step, tensor.block[1]) if dim == -2 else (tensor.block[0], step))
    scales = fine.scales
    return replace(
        fine,
        values=fine.values.narrow(dim, start // each, length // each),
        scales=None if scales is None else scales.narrow(dim, start // step, length // step),
        global_scale=_cut_global(tensor, start, length) if dim == -2 else tensor.global_scale,
    )


def _cut_global(tensor: QuantizedTensor, start: int, length: int) -> Tensor | None:
    found = tensor.global_scale
    if found is None or found.dim() < tensor.values.dim() - 1:
        return found
    span = tensor.shape[-2] // found.shape[-1]
    if length and start // span != (start + length - 1) // span:
        raise ValueError(f"rows {start} .. {start + length} have two global scales, one for every {span} rows")
    return found[..., start // span]


def stack_rows(first: QuantizedTensor, second: QuantizedTensor) -> QuantizedTensor:
    """``first`` above ``second``, two matrices of one shape stored alike; each keeps its own global scale.

    Raises:
        ValueError: if shape or storage differ, or a short last block would come to lie inside.
    """
    _require_alike(first, second, list(first.shape), list(second.shape))
    if first.shape[-2] % first.block[0]:
        raise ValueError(
            f"the boundary at row {first.shape[-2]} would cut a {first.block[0]}-row scale block: regrid first"
        )
    joined = None
    if first.global_scale is not None and second.global_scale is not None:
        joined = torch.stack([t.expand(first.shape[:-2]) for t in (first.global_scale, second.global_scale)], dim=-1)
    return _join(first, second, -2, joined)


def append(first: QuantizedTensor, second: QuantizedTensor) -> QuantizedTensor:
    """The matrices of stack ``second`` behind those of stack ``first``, all of one shape and stored alike.

    Raises:
        ValueError: if the matrices' shape or storage differ.
    """
    _require_alike(first, second, list(first.shape[1:]), list(second.shape[1:]))
    joined = None
    if first.global_scale is not None and second.global_scale is not None:
        ranges = max(_ranges(first), _ranges(second))
        joined = torch.cat([_spread_global(t, ranges) for t in (first, second)])
        joined = joined if ranges > 1 else joined[:, 0]
    return _join(first, second, 0, joined)


def _require_alike(first: QuantizedTensor, second: QuantizedTensor, shape: list[int], other_shape: list[int]) -> None:
    for what, one, other in (
        ("shape", shape, other_shape),
        ("format", first.format.value, second.format.value),
        ("scale block", first.block, second.block),
        ("values", _storage(first.values), _storage(second.values)),
        ("scales", _storage(first.scales), _storage(second.scales)),
    ):
        if one != other:
            raise ValueError(f"cannot join matrices of different {what}: {one} and {other}")


def _storage(tensor: Tensor | None) -> str:
    """What must agree for two tensors to be joined: the one-byte dtypes of a role all read alike."""
    return "none" if tensor is None else "bytes" if tensor.element_size() == 1 else str(tensor.dtype)


def _ranges(tensor: QuantizedTensor) -> int:
    found = tensor.global_scale
    return found.shape[-1] if found is not None and found.dim() == tensor.values.dim() - 1 else 1


def _spread_global(tensor: QuantizedTensor, ranges: int) -> Tensor:
    """One global scale for each of ``ranges`` ranges of rows, ``[E, ranges]``."""
    assert tensor.global_scale is not None
    each = tensor.global_scale if _ranges(tensor) > 1 else tensor.global_scale.expand(tensor.shape[0])[:, None]
    return each.repeat_interleave(ranges // each.shape[1], dim=1)


def _join(first: QuantizedTensor, second: QuantizedTensor, dim: int, global_scale: Tensor | None) -> QuantizedTensor:
    values = torch.cat((plain_bytes(first.values), plain_bytes(second.values)), dim).view(first.values.dtype)
    scales = None
    if first.scales is not None and second.scales is not None:
        scales = torch.cat((plain_bytes(first.scales), plain_bytes(second.scales)), dim).view(first.scales.dtype)
    return replace(first, values=values, scales=scales, global_scale=global_scale)
