"""From a call's arguments to what kernels take: addresses, numbers, compile-time facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from foldmoe.backends.triton.layout import Experts, Matrix


def gate_up(experts: Experts | None) -> Matrix | None:
    return experts.gate_up if experts else None


def down(experts: Experts | None) -> Matrix | None:
    return experts.down if experts else None


def constants(prefix: str, matrix: Matrix | None) -> dict[str, int]:
    if matrix is not None:
        return matrix.constants(prefix)
    names = {"BITS": 16, "PLANES": 1, "BK": 128, "SCALE": 0, "WIDE": 0, "SN": 1, "SK": 128, "TAIL": 0}
    return {f"{prefix}_{name}": value for name, value in names.items()}


def aligned(x: Tensor) -> Tensor:
    """x at a 16-byte boundary: kernels are compiled for that."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def host_or_device(value: int | Tensor | None, whole: int, device: torch.device) -> tuple[int, Tensor | None]:
    """A number, or -1 and where the device finds it."""
    if value is None:
        return whole, None
    if isinstance(value, Tensor) and value.device == device:
        return -1, value.to(torch.int32)
    return min(max(int(value), 0), whole), None


def host_or_device_rows(rows: tuple[int, int] | Tensor, device: torch.device) -> tuple[int, int, Tensor | None]:
    if isinstance(rows, Tensor) and rows.device == device:
        return -1, -1, rows.to(torch.int32).contiguous()
    start, end = (max(int(row), 0) for row in rows)
    return start, end, None
