"""How vLLM's configuration says that a layer's routed experts are stored."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from foldmoe.formats import Format

FP8_BLOCKS = {format.block: format for format in (Format.FP8_128x128, Format.FP8_32x32)}
"""By what vLLM calls ``weight_block_size``."""


@dataclass(frozen=True)
class Storage:
    """One set of routed experts as stored.

    Args:
        format: of values and scales.
        scale_name: end of the scale parameters' names, as vLLM's loaders look for it; empty for bf16.
        scale_dtype: of the scales; None for bf16.
        dynamic: the checkpoint declares FP8 activations, scaled as they come.
    """

    format: Format
    scale_name: str = ""
    scale_dtype: torch.dtype | None = None
    dynamic: bool = False

    def rows_block(self, width: int) -> int:
        """Rows of gate or up that share a scale once a rank's ``width`` rows are cut out."""
        return gcd(self.format.block[0], width)

    def columns_block(self, width: int, parts: int) -> int:
        """Columns of down that share a scale once a rank's ``width`` columns are one of ``parts``."""
        return self.format.block[1] if parts == 1 else gcd(self.format.block[1], width)


def routed_storage(quant_config: Any, skipped: bool) -> Storage | str:
    """The storage, or why it is none that folds.

    Args:
        quant_config: vLLM's ``QuantizationConfig`` or None.
        skipped: the configuration leaves this layer unquantised.
    """
    if quant_config is None or skipped:
        return Storage(Format.BF16)
    name = str(quant_config.get_name())
    if name not in ("fp8", "deepseek_v4_fp8"):
        return f"routed experts quantised as {name!r} stay with vLLM; known here: bf16, block FP8, MXFP4"
    if not getattr(quant_config, "is_checkpoint_fp8_serialized", False):
        return "vLLM quantises this bf16 checkpoint to FP8 while loading: the precision is not the stored one"
    if getattr(quant_config, "online_quantization_config", None) is not None:
        return "quantisation while loading was asked for (--quantization-config): the precision is not the stored one"
    if other := getattr(quant_config, "store_dtype", None):
        return f"an FP8 checkpoint whose experts are stored as {other} stays with vLLM"
    dynamic = quant_config.activation_scheme == "dynamic"
    if name == "deepseek_v4_fp8" and quant_config.expert_dtype == "fp4":
        if algorithm := getattr(quant_config, "moe_quant_algo", ""):
            return f"routed experts stored as {algorithm} stay with vLLM"
        return Storage(Format.MXFP4, "weight_scale", torch.uint8, dynamic)
    block = quant_config.weight_block_size
    if block is None or tuple(block) not in FP8_BLOCKS:
        return f"FP8 with weight_block_size {block}: only blocks of 128x128 and 32x32 are known here"
    # Float32 as in vLLM's own layers, also where the configuration names E8M0: bytes are converted, which is exact.
    return Storage(FP8_BLOCKS[tuple(block)], "weight_scale_inv", torch.float32, dynamic)
