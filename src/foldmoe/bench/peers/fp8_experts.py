"""Routed experts held as FP8 with 128x128 scales, for peers that have no MXFP4 kernel on Hopper."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foldmoe.formats import Format, fp8

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.formats import QuantizedTensor


def block_fp8(*parts: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Stacks of ``[E, N, K]`` joined along E, as E4M3 ``[E, N, K]`` and float32 scales ``[E, N / 128, K / 128]``.

    Powers of two are the scales, so that E2M1 codes stay exact where a block's exponents span few enough binades (11 at
    least). 128x128 FP8 is taken as it is.
    """
    values, scales = [], []
    for part in parts:
        for expert in range(part.shape[0]):  # one at a time: float32 is eight times MXFP4
            stored = part[expert]
            if stored.format is not Format.FP8_128x128 or stored.block != Format.FP8_128x128.block:
                stored = fp8.quantize_block(stored.dequantize(), e8m0_scales=True)
            values.append(stored.values)
            scales.append(stored.scale_values())
    return torch.stack(values), torch.stack(scales)
