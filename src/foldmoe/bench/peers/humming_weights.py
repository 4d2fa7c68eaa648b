"""Stored weights as humming-kernels takes them, before it transforms them to its kernel layout.

Source: ``humming.schema`` of humming-kernels 0.1.19 (``HummingWeightSchema.get_tensors_attrs``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from foldmoe.formats import Format

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.formats import QuantizedTensor

SCHEMAS: dict[Format, dict[str, Any]] = {
    Format.MXFP4: {"b_dtype": "float4e2m1", "bs_dtype": "float8e8m0", "weight_scale_group_size": 32},
    Format.FP8_128x128: {
        "b_dtype": "float8e4m3",
        "weight_scale_group_size": 128,
        "weight_scale_group_size_n": 128,
        "weight_scale_type": "block",
    },
    Format.FP8_32x32: {"b_dtype": "float8e4m3", "bs_dtype": "bfloat16", "weight_scale_group_size": 32},
}
"""Arguments of ``HummingWeightSchema``. It has no 32x32 blocks: their scales are repeated, one a row and 32 columns."""


def tensors(stored: QuantizedTensor) -> dict[str, Tensor]:
    """``weight`` int32 ``[..., N, K * bits / 32]`` and ``weight_scale``, copies, value for value.

    A ``weight`` word holds consecutive k, the first in its lowest bits. Scales: E8M0 ``[..., N, K / 32]`` for MXFP4,
    float32 ``[..., N / 128, K / 128]`` for 128x128 blocks, bfloat16 ``[..., N, K / 32]`` for 32x32 blocks.

    Raises:
        ValueError: for a format or block that humming does not take.
    """
    if stored.format not in SCHEMAS or stored.block != stored.format.block or stored.scales is None:
        raise ValueError(f"humming takes no {stored.format.value} with {stored.block[0]}x{stored.block[1]} blocks")
    words = stored.values.contiguous().clone().view(torch.uint8).view(torch.int32)
    if stored.format is Format.MXFP4:
        return {"weight": words, "weight_scale": stored.scales.view(torch.uint8).clone().view(torch.float8_e8m0fnu)}
    scales = stored.scale_values()
    if stored.format is Format.FP8_32x32:
        scales = scales.repeat_interleave(32, dim=-2)[..., : stored.shape[-2], :].to(torch.bfloat16)
    return {"weight": words, "weight_scale": scales.contiguous().clone()}
