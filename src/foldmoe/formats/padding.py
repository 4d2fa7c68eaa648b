"""Widening an expert without changing its result: zeros for values, one for scales."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from foldmoe.formats import blocks

if TYPE_CHECKING:
    from foldmoe.formats.tensor import QuantizedTensor


def pad_intermediate(gate_up: QuantizedTensor, down: QuantizedTensor, width: int) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Widen experts from I to ``width``: gate and up rows and down columns gain zeros, new scales are 1.

    act(0, 0) = 0, so the layer's result keeps every bit. ``gate_up`` is ``[..., 2I, H]``, ``down`` ``[..., H, I]``.

    Raises:
        ValueError: if ``width`` is smaller than I.
    """
    narrow = down.shape[-1]
    if width < narrow:
        raise ValueError(f"cannot pad a width of {narrow} down to {width}")
    halves = [_pad_rows(_rows(gate_up, half, narrow), width) for half in (0, 1)]
    stacked = _stack_rows(halves[0], halves[1])
    return stacked, _pad_columns(down, width)


def _rows(gate_up: QuantizedTensor, half: int, narrow: int) -> QuantizedTensor:
    if narrow % gate_up.block[0]:
        raise ValueError(f"the gate/up boundary at row {narrow} cuts a {gate_up.block[0]}-row scale block: regrid first")
    return gate_up.map(lambda t: t if t.dim() == 0 or t is gate_up.global_scale else t.chunk(2, dim=-2)[half])


def _stack_rows(first: QuantizedTensor, second: QuantizedTensor) -> QuantizedTensor:
    scales = None
    if first.scales is not None and second.scales is not None:
        scales = torch.cat((_bytes(first.scales), _bytes(second.scales)), dim=-2).view(first.scales.dtype)
    values = torch.cat((_bytes(first.values), _bytes(second.values)), dim=-2).view(first.values.dtype)
    return replace(first, values=values, scales=scales)


def _pad_rows(tensor: QuantizedTensor, rows: int) -> QuantizedTensor:
    return _grow(tensor, rows - tensor.shape[-2], 0)


def _pad_columns(tensor: QuantizedTensor, columns: int) -> QuantizedTensor:
    return _grow(tensor, 0, columns - tensor.shape[-1])


def _grow(tensor: QuantizedTensor, rows: int, columns: int) -> QuantizedTensor:
    n, k = tensor.shape[-2] + rows, tensor.shape[-1] + columns
    stored_columns = columns // 2 if tensor.format.packed else columns
    values = pad(_bytes(tensor.values), (0, stored_columns, 0, rows)).view(tensor.values.dtype)
    scales = tensor.scales
    if scales is not None:
        want = blocks.scale_shape(n, k, tensor.block)
        grow = (0, want[1] - scales.shape[-1], 0, want[0] - scales.shape[-2])
        scales = pad(_bytes(scales), grow, value=_one(scales)).view(scales.dtype)
    return replace(tensor, values=values, scales=scales)


def _bytes(t: Tensor) -> Tensor:
    """torch pads and concatenates plain dtypes only; one-byte floats travel as bytes."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def _one(scales: Tensor) -> float:
    """What 1.0 is in the scales' own storage: byte 127 for E8M0, 0x38 for E4M3."""
    if scales.element_size() > 1:
        return 1.0
    return 0x38 if scales.dtype == torch.float8_e4m3fn else 127
