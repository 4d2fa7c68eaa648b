"""From the headers of one expert's tensors to format, width and hidden size; dtypes and shapes decide, never names."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch

from foldmoe.checkpoint.families import Matrix, Slot
from foldmoe.checkpoint.shards import CheckpointError, ForeignFormatError, TensorHeader
from foldmoe.formats.tensor import Format, detect

if TYPE_CHECKING:
    from collections.abc import Mapping

_E8M0 = ("U8", "I8", "F8_E8M0")
_PACKED = ("U8", "I8", "F4")


@dataclass(frozen=True)
class StoredMatrix:
    """One projection as stored: ``[rows, columns]`` logical, its format and the names of its tensors.

    Args:
        global_shape: NVFP4's one scale is ``[]`` in some files and ``[1]`` in others.
    """

    values: str
    scales: str | None
    global_scale: str | None
    global_shape: tuple[int, ...]
    format: Format
    rows: int
    columns: int
    e8m0_scales: bool


@dataclass(frozen=True)
class StoredSet:
    """Routed experts, or a shared one: every expert has these formats and sizes.

    Args:
        gate, up: None where both are stored as one ``gate_up`` ``[2I, H]``.
        width, hidden: I and H.
    """

    gate: StoredMatrix | None
    up: StoredMatrix | None
    gate_up: StoredMatrix | None
    down: StoredMatrix
    width: int
    hidden: int

    @property
    def format(self) -> Format:
        return self.down.format


def read_set(slots: Mapping[Slot, str], tensors: Mapping[str, TensorHeader], *, stacked: bool = False) -> StoredSet:
    """Facts of one expert's tensors, or of a stack's.

    Raises:
        CheckpointError: a missing projection, or shapes that do not belong together; the message names tensor, dtype
            and shape.
        ForeignFormatError: a format that is not read here.
    """

    def read(matrix: Matrix) -> StoredMatrix | None:
        return _matrix(slots, matrix, tensors, stacked)

    gate, up, gate_up, down = read("gate"), read("up"), read("gate_up"), read("down")
    if down is None:
        raise CheckpointError("the down projection (w2, down_proj) is missing")
    if gate_up is not None and (gate is not None or up is not None):
        raise CheckpointError("gate and up stand both alone and stacked; one of the two does not belong")
    if gate_up is None and (gate is None or up is None):
        which = "gate (w1, gate_proj)" if gate is None else "up (w3, up_proj)"
        raise CheckpointError(f"the {which} projection is missing")
    first = gate_up or gate
    assert first is not None
    width, hidden = down.columns, down.rows
    rows = 2 * width if gate_up else width
    for part in (gate, up, gate_up):
        if part is not None and (part.rows, part.columns) != (rows, hidden):
            turned = (part.columns, part.rows) == (2 * down.rows, down.columns)
            hint = ": stored transposed, which is not read here" if turned else ""
            kind = ForeignFormatError if turned else CheckpointError
            raise kind(
                f"{part.values} is [{part.rows}, {part.columns}] but {down.values} is [{hidden}, {width}]; expected "
                f"[{rows}, {hidden}]{hint}"
            )
        if part is not None and (part.format, part.e8m0_scales) != (down.format, down.e8m0_scales):
            raise ForeignFormatError(
                f"{part.values} is {part.format.value} but {down.values} is {down.format.value}, or their scales "
                "differ; the projections of one expert must agree"
            )
    return StoredSet(gate, up, gate_up, down, width, hidden)


def _matrix(
    slots: Mapping[Slot, str], matrix: Matrix, tensors: Mapping[str, TensorHeader], stacked: bool
) -> StoredMatrix | None:
    name = slots.get(Slot(matrix, "values"))
    if name is None:
        return None
    scales, global_scale = slots.get(Slot(matrix, "scales")), slots.get(Slot(matrix, "global_scale"))
    header, scale_header = tensors[name], tensors[scales] if scales else None
    dims = 3 if stacked else 2
    if len(header.shape) != dims:
        raise CheckpointError(f"{name} {header}: expected {dims} dimensions")
    if header.torch_dtype is None:
        raise ForeignFormatError(f"{name} {header}: no format of ours uses this dtype")
    *_, rows, columns = header.stored_shape
    columns *= 2 if header.dtype in _PACKED else 1
    try:
        found = detect(
            header.torch_dtype,
            header.stored_shape,
            scale_header.torch_dtype if scale_header else None,
            scale_header.shape if scale_header else None,
            (rows, columns),
        )
    except (TypeError, ValueError) as error:
        beside = f" with {scales} {scale_header}" if scales else ""
        stack = header.shape[0] if stacked else 1
        foreign = isinstance(error, TypeError) or _coarse(header, scale_header, stack, rows)
        kind = ForeignFormatError if foreign else CheckpointError
        raise kind(f"{name} {header}{beside}: {error}") from error
    if scale_header and len(scale_header.shape) != dims:
        raise CheckpointError(f"{scales} {scale_header}: expected {dims} dimensions")
    if (global_scale is None) == (found is Format.NVFP4):
        which = "needs a" if found is Format.NVFP4 else "takes no"
        raise CheckpointError(f"{name} {header}: {found.value} {which} weight_scale_2")
    e8m0 = scale_header is not None and scale_header.dtype in _E8M0
    global_shape = tensors[global_scale].shape if global_scale else ()
    return StoredMatrix(name, scales, global_scale, global_shape, found, rows, columns, e8m0)


def _coarse(values: TensorHeader, scales: TensorHeader | None, stack: int, rows: int) -> bool:
    """FP8 with one scale a tensor or a row, as compressed-tensors and others store it."""
    if scales is None or values.torch_dtype != torch.float8_e4m3fn:
        return False
    return prod(scales.shape) in (1, stack, stack * rows)
