"""Stored weights as the kernels read them: views, never copies.

The layout is the stored one. A matrix is 16-bit words along K (4 E2M1 codes, 2 E4M3 values or 1 bf16 value) in whatever
row and expert stride the tensor has, beside its stored scales.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.backends.base import Unsupported
from foldmoe.formats import Format
from foldmoe.formats.checks import nan_positions

if TYPE_CHECKING:
    from foldmoe.formats import QuantizedTensor
    from foldmoe.moe import ExpertWeights

NO_SCALE, FOLDED_SCALE, PARTIAL_SCALE = 0, 1, 2
_STEPS = {4: 128, 2: 64, 1: 64}
"""Columns of a K step by columns a word: 64 or 128 bytes of a row; larger steps of FP8 spill registers."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """One projection of a set of experts.

    Args:
        words: ``[E, N, K / planes]`` int16 (bf16 for plain weights), a view of the stored values.
        scales: ``[E, N / sn, K / sk]`` uint8 or float, a view of the stored scales; the words where there are none.
        columns: K.
        planes: columns a word.
        step: columns the kernel takes at a time.
        scale: 0 none; 1 E8M0, multiplied into the weights; 2 float, multiplied onto partial sums.
        wide: an E8M0 scale is so large that it needs a multiplication of its own.
        block: (rows, columns) a scale.
    """

    words: Tensor
    scales: Tensor
    columns: int
    planes: int
    step: int
    scale: int
    wide: bool
    block: tuple[int, int]

    @property
    def tail(self) -> bool:
        return self.columns % self.step != 0

    @property
    def bits(self) -> int:
        return 16 // self.planes

    @property
    def order(self) -> tuple[int, int]:
        """(planes, step): the column order its activations come in."""
        return self.planes, self.step

    def constants(self, prefix: str) -> dict[str, int]:
        """Compile-time facts under a kernel's parameter names."""
        facts = {
            "BITS": self.bits, "PLANES": self.planes, "BK": self.step, "SCALE": self.scale, "WIDE": int(self.wide),
            "SN": self.block[0], "SK": self.block[1], "TAIL": int(self.tail),
        }  # fmt: skip
        return {f"{prefix}_{name}": value for name, value in facts.items()}


def matrix(tensor: QuantizedTensor, name: str) -> Matrix:
    """A view of a stored stack ``[E, N, K]``.

    Raises:
        Unsupported: values that are not contiguous along K, codes at odd bytes, rows so far apart that one expert takes
            2**31 elements, scales for columns that no step divides, or plain floats other than bf16.
        ValueError: a scale of NaN.
    """
    columns = tensor.shape[-1]
    values = tensor.values
    if values.stride(-1) != 1:
        raise Unsupported(
            f"{name}: values must be contiguous along their last dimension, found strides {values.stride()}"
        )
    if tensor.format is Format.BF16:
        if values.dtype != torch.bfloat16:
            raise Unsupported(f"{name}: plain weights must be bfloat16, found {values.dtype}")
        _check_span(values, name)
        return Matrix(values, values, columns, 1, _STEPS[1], NO_SCALE, False, (1, _STEPS[1]))
    assert tensor.scales is not None
    if values.storage_offset() % 2 or any(stride % 2 for stride in values.stride()[:-1]):
        raise Unsupported(
            f"{name}: codes are read two bytes at a time, but rows begin at odd ones: strides {values.stride()}, "
            f"offset {values.storage_offset()}"
        )
    words = values.view(torch.uint8).view(torch.int16)
    planes = 4 if tensor.format.packed else 2
    if not whole_steps(tensor.block[1], planes):
        raise Unsupported(
            f"{name}: scales cover {tensor.block[1]} columns, which do not fit steps of {_STEPS[planes]} columns"
        )
    _check_span(words, name)
    _check_span(tensor.scales, f"{name} scales")
    _check_scales(tensor, name)
    if not tensor.e8m0_scales:
        step = min(_STEPS[planes], tensor.block[1])
        return Matrix(words, tensor.scales, columns, planes, step, PARTIAL_SCALE, False, tensor.block)
    scales = tensor.scales.view(torch.uint8)
    known = scales.numel() and not scales.is_meta  # an outline's scales are taken to be small
    largest = int(scales.max()) if known else 0
    wide = largest > 254 - (126 if planes == 4 else 120)
    return Matrix(words, scales, columns, planes, _STEPS[planes], FOLDED_SCALE, wide, tensor.block)


def whole_steps(columns: int, planes: int) -> bool:
    """Whether scales of ``columns`` columns change only between K steps, or fit a step a whole number of times."""
    return columns % _STEPS[planes] == 0 or _STEPS[planes] % columns == 0


def _check_span(stack: Tensor, name: str) -> None:
    """One expert's offsets are 32 bits wide."""
    span = sum((size - 1) * stride for size, stride in zip(stack.shape[1:], stack.stride()[1:], strict=True)) + 1
    if span > 2**31:
        raise Unsupported(f"{name}: one expert spans {span} elements with strides {stack.stride()}, the limit is 2**31")


def _check_scales(tensor: QuantizedTensor, name: str) -> None:
    assert tensor.scales is not None
    if tensor.scales.is_meta:
        return
    found = nan_positions(tensor.scales, e8m0_scales=tensor.e8m0_scales)
    if len(found):
        raise ValueError(f"{name}: {len(found)} scales are NaN or Inf, the first at {found[0].tolist()}")


@dataclass(frozen=True, eq=False)
class Experts:
    """One set of experts: the stored weights and the kernels' view of them."""

    stored: ExpertWeights
    gate_up: Matrix
    down: Matrix

    @property
    def count(self) -> int:
        return self.stored.num_experts

    @property
    def width(self) -> int:
        return self.stored.width


def pack(weights: ExpertWeights, which: str) -> Experts:
    """The kernels' view. Nothing is copied."""
    return Experts(weights, matrix(weights.gate_up, f"{which} gate_up"), matrix(weights.down, f"{which} down"))


def unpack(experts: Experts) -> ExpertWeights:
    """The stored weights, the very tensors that :func:`pack` got."""
    return experts.stored
