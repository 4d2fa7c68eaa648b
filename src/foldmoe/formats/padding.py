"""Widening an expert without changing its result: zeros for values, one for scales."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from foldmoe.formats import blocks
from foldmoe.formats.blocks import plain_bytes
from foldmoe.formats.cutting import cut, stack_rows

if TYPE_CHECKING:
    from foldmoe.formats.tensor import QuantizedTensor


def pad_intermediate(
    gate_up: QuantizedTensor, down: QuantizedTensor, width: int
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Widen experts from I to ``width``: gate and up rows and down columns gain zeros, new scales are 1.

    act(0, 0) = 0, so the layer's result keeps every bit. ``gate_up`` is ``[..., 2I, H]``, ``down`` ``[..., H, I]``.

    Raises:
        ValueError: if ``width`` is smaller than I, or cuts a scale block or a byte.
    """
    narrow = down.shape[-1]
    if width < narrow:
        raise ValueError(f"cannot pad a width of {narrow} down to {width}")
    if gate_up.shape[-2] != 2 * narrow:
        raise ValueError(f"gate_up {list(gate_up.shape)} and down {list(down.shape)} do not belong together")
    if width % gate_up.block[0] or (down.format.packed and width % 2):
        raise ValueError(
            f"{down.format.value} cannot be padded to a width of {width}: no multiple of its "
            f"{gate_up.block[0]}-row scale blocks, or of the 2 values in a byte"
        )
    gate, up = (_pad_rows(cut(gate_up, -2, start, narrow), width) for start in (0, narrow))
    return stack_rows(gate, up), _pad_columns(down, width)


def unpad_intermediate(
    gate_up: QuantizedTensor, down: QuantizedTensor, width: int
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Inverse of :func:`pad_intermediate`: the stored tensors of width ``width`` again, bit for bit.

    Raises:
        ValueError: if the experts are narrower than ``width``.
    """
    wide = down.shape[-1]
    if width > wide:
        raise ValueError(f"experts of width {wide} were never padded from {width}")
    gate, up = (_shrink(cut(gate_up, -2, start, wide), width, gate_up.shape[-1]) for start in (0, wide))
    return stack_rows(gate, up), _shrink(down, down.shape[-2], width)


def _pad_rows(tensor: QuantizedTensor, rows: int) -> QuantizedTensor:
    return _grow(tensor, rows - tensor.shape[-2], 0)


def _pad_columns(tensor: QuantizedTensor, columns: int) -> QuantizedTensor:
    return _grow(tensor, 0, columns - tensor.shape[-1])


def _grow(tensor: QuantizedTensor, rows: int, columns: int) -> QuantizedTensor:
    n, k = tensor.shape[-2] + rows, tensor.shape[-1] + columns
    stored_columns = columns // 2 if tensor.format.packed else columns
    values = pad(plain_bytes(tensor.values), (0, stored_columns, 0, rows)).view(tensor.values.dtype)
    scales = tensor.scales
    if scales is not None:
        want = blocks.scale_shape(n, k, tensor.block)
        grow = (0, want[1] - scales.shape[-1], 0, want[0] - scales.shape[-2])
        scales = pad(plain_bytes(scales), grow, value=_one(scales)).view(scales.dtype)
    return replace(tensor, values=values, scales=scales)


def _shrink(tensor: QuantizedTensor, rows: int, columns: int) -> QuantizedTensor:
    """The top left corner, on the same scale grid."""
    scales = tensor.scales
    if scales is not None:
        n, k = blocks.scale_shape(rows, columns, tensor.block)
        scales = scales[..., :n, :k]
    stored_columns = columns // 2 if tensor.format.packed else columns
    return replace(tensor, values=tensor.values[..., :rows, :stored_columns], scales=scales)


def _one(scales: Tensor) -> float:
    """What 1.0 is in the scales' own storage: byte 127 for E8M0, 0x38 for E4M3."""
    if scales.element_size() > 1:
        return 1.0
    return 0x38 if scales.dtype == torch.float8_e4m3fn else 127
