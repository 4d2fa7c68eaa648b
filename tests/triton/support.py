"""Layers on the Triton backend, by way of the contract that the front door uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from foldmoe.backends.base import Call
from foldmoe.backends.triton.backend import TritonBackend
from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import Activation, ExpertWeights
from foldmoe.reference import reference_moe
from tests.support.cases import BF16_TOLERANCE, FP8_TOLERANCE, Case, quantize

if TYPE_CHECKING:
    from foldmoe.backends.triton.layer import TritonLayer

LIMIT = 1.5
"""A clamp that bites on inputs of unit variance."""

TOLERANCE = {"bf16": BF16_TOLERANCE, "fp8": FP8_TOLERANCE, "fp8_token": FP8_TOLERANCE}

Stored = tuple[Format, bool | None]
MXFP4: Stored = (Format.MXFP4, None)
FP8: Stored = (Format.FP8_128x128, False)
FP8_E8M0: Stored = (Format.FP8_128x128, True)
FP8_32: Stored = (Format.FP8_32x32, True)
FP8_32_FLOAT: Stored = (Format.FP8_32x32, False)
MXFP8: Stored = (Format.MXFP8, None)
BF16: Stored = (Format.BF16, None)

PAIRS: dict[str, tuple[Stored, Stored]] = {
    "mxfp4-fp8": (MXFP4, FP8),
    "mxfp4-fp8_e8m0": (MXFP4, FP8_E8M0),
    "mxfp4-fp8_32": (MXFP4, FP8_32),
    "mxfp4-mxfp4": (MXFP4, MXFP4),
    "fp8-fp8": (FP8, FP8),
    "fp8_e8m0-fp8_e8m0": (FP8_E8M0, FP8_E8M0),
    "fp8_32float-bf16": (FP8_32_FLOAT, BF16),
    "bf16-bf16": (BF16, BF16),
    "mxfp8-fp8": (MXFP8, FP8),
    "mxfp8-bf16": (MXFP8, BF16),
}

HOPPER_PAIRS: dict[str, tuple[Stored, Stored]] = PAIRS | {
    "fp8-fp8_32": (FP8, FP8_32),
    "fp8_32-fp8": (FP8_32, FP8),
    "fp8_32-fp8_32": (FP8_32, FP8_32),
}


def weights(
    pair: str, experts: int, width: int, shared_width: int, hidden: int, device: str = "cpu"
) -> tuple[ExpertWeights, ExpertWeights]:
    """Routed and shared experts of a named pair of formats, quantised where they will run."""
    routed, shared = HOPPER_PAIRS[pair]
    return _experts(routed, experts, width, hidden, 0, device), _experts(shared, 1, shared_width, hidden, 1, device)


def _experts(stored: Stored, experts: int, width: int, hidden: int, seed: int, device: str) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> QuantizedTensor:
        weight = torch.randn(experts, rows, columns, generator=generator).to(device) / columns**0.5
        weight[:1, -1] = 0.0
        return quantize(weight, stored[0], e8m0_scales=stored[1])

    return ExpertWeights.from_parts(matrix(width, hidden), matrix(width, hidden), matrix(hidden, width))


def pack(routed: ExpertWeights, shared: ExpertWeights | None, activations: str, **options: Any) -> TritonLayer:
    """A packed layer; routed experts are clamped, the shared expert is not."""
    options = {"activation": Activation(LIMIT), "shared_activation": Activation()} | options
    return TritonBackend().pack(routed, shared, activations=activations, **options)  # type: ignore[return-value, arg-type]


def call_of(case: Case) -> Call:
    return Call(*case.args, **case.kwargs)


def expected(case: Case, routed: ExpertWeights, shared: ExpertWeights | None, activations: str) -> torch.Tensor:
    return reference_moe(
        *case.args, routed, shared, activation=Activation(LIMIT), shared_activation=Activation(),
        activations=activations, **case.kwargs,
    )  # type: ignore[arg-type]  # fmt: skip
