"""Weights for a checkpoint that is only a ``config.json``: ``vllm serve FOLDER --load-format foldmoe_random``.

vLLM's own ``--load-format dummy`` is of no use to time MoE layers. It leaves integers as they are, so that every MXFP4
code is zero, FP8 weights within +-1e-3 round to zero nearly all, and the router's bias outweighs its scores: each token
goes to the same few experts, and the others' weights are never read. Here every stored code is drawn, and weights are
scaled so that layers keep their input's magnitude: scores differ from token to token, and experts share the load.

Answers are still noise. Equal seeds give equal weights by a parameter's name and shape, whichever arm is served.
"""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor, nn

LOAD_FORMAT = "foldmoe_random"

_FP8_SCALE, _MXFP4_SCALE = 114, 120
"""E8M0 bytes, 2^-13 and 2^-7: drawn codes have a root mean square of about 100 and 3, and 4096 in a row want 1/64."""

_FP8_NAN = 0x7F


def register() -> None:
    """Make the load format known to vLLM: what its plugin entry point calls in every process."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class RandomLoader(DummyModelLoader):  # type: ignore[misc]  # vLLM is not installed where types are checked
        """As vLLM's dummy loader, with other numbers."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            fill(model)

    register_model_loader(LOAD_FORMAT)(RandomLoader)


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0) -> None:
    """Draw all parameters, in place.

    Args:
        model: parameters as a checkpoint's loader would find them, before anything is repacked.
        seed: of the numbers, together with a parameter's name.
    """
    for name, parameter in model.named_parameters():
        generator = torch.Generator(parameter.device).manual_seed(seed + zlib.crc32(name.encode()))
        _fill(name, parameter.data, generator)


def _fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    last = name.rsplit(".", 1)[-1]
    scale = "scale" in last and tensor.dim() > 1
    if tensor.dtype == torch.float8_e8m0fnu:
        tensor.view(torch.uint8).fill_(_FP8_SCALE)
    elif tensor.dtype == torch.float8_e4m3fn:
        codes = tensor.view(torch.uint8).random_(0, 256, generator=generator)
        codes.masked_fill_(codes.bitwise_and(_FP8_NAN) == _FP8_NAN, 0)
    elif tensor.dtype in (torch.uint8, torch.int8) and scale:
        tensor.fill_(_MXFP4_SCALE)
    elif tensor.dtype in (torch.uint8, torch.int8):
        tensor.view(torch.uint8).random_(0, 256, generator=generator)
    elif not tensor.is_floating_point():
        return  # tables of expert ids: a model's constructor makes valid ones
    elif scale:
        tensor.fill_(2.0 ** (_FP8_SCALE - 127))
    elif tensor.dim() < 2:
        tensor.fill_(1.0 if "norm" in name else 0.0)
    else:
        bound = math.sqrt(3.0 / tensor.shape[-1])
        tensor.uniform_(-bound, bound, generator=generator)
