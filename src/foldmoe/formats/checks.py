"""Bytes that no checkpoint may hold: NaN values or scales are refused by tensor name and index, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.formats import e8m0, fp8

if TYPE_CHECKING:
    from foldmoe.formats.tensor import QuantizedTensor


def nan_positions(tensor: Tensor, *, e8m0_scales: bool = False) -> Tensor:
    """Indices ``[n, dims]`` of NaN (and Inf) in a stored tensor; E8M0 bytes are read as such when asked."""
    if e8m0_scales:
        stored = e8m0.as_bytes(tensor)
        if not stored.numel() or int(stored.max()) < e8m0.NAN_BYTE:  # no mask as large as the scales
            return torch.empty(0, tensor.dim(), dtype=torch.int64)
        bad = stored == e8m0.NAN_BYTE
    elif tensor.dtype == torch.float8_e4m3fn:
        bad = fp8.nan_mask(tensor)
    elif tensor.is_floating_point() and tensor.dtype not in (torch.float8_e8m0fnu, torch.float4_e2m1fn_x2):
        bad = ~torch.isfinite(tensor)
    else:
        return torch.empty(0, tensor.dim(), dtype=torch.int64)
    return bad.nonzero()


def refuse_nan(tensor: QuantizedTensor, name: str, scale_name: str | None = None) -> None:
    """Raise if values or scales hold a NaN or Inf.

    Raises:
        ValueError: naming the tensor, the first index and how many there are.
    """
    for role, stored in tensor.tensors().items():
        found = nan_positions(stored, e8m0_scales=role == "scales" and tensor.e8m0_scales)
        if len(found):
            label = scale_name if role == "scales" and scale_name else name if role == "values" else f"{name} ({role})"
            raise ValueError(
                f"{label}: {len(found)} NaN or Inf, the first at {found[0].tolist()}; "
                f"expected finite {tensor.format.value} numbers. The file is damaged or was exported wrongly"
            )
