"""Small layers on a CPU, packed for the GPU backends, and the specs that a header would tell of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from foldmoe import Activation, ExpertWeights, Format, FusionPolicy, LayerPlan, QuantizedTensor, plan_layer
from foldmoe.backends import PackedLayer, get
from foldmoe.formats import fp8, mxfp4
from foldmoe.moe import ExpertSpec, LayerSpec

if TYPE_CHECKING:
    import pytest

EXPERTS, HIDDEN, WIDTH, TOP_K = 8, 256, 192, 2


def stored(tensor: QuantizedTensor) -> QuantizedTensor:
    """Contiguous, as a checkpoint's."""
    return replace(tensor, scales=tensor.scales.contiguous())


def weights() -> tuple[ExpertWeights, ExpertWeights]:
    g = torch.Generator().manual_seed(0)

    def experts(count: int, width: int, quantize: object) -> ExpertWeights:
        up = torch.randn(count, 2 * width, HIDDEN, generator=g) * 0.02
        down = torch.randn(count, HIDDEN, width, generator=g) * 0.02
        return ExpertWeights(*(stored(quantize(matrix)) for matrix in (up, down)))

    return experts(EXPERTS, WIDTH, mxfp4.quantize), experts(
        1, 128, partial(fp8.quantize_block, format=Format.FP8_32x32)
    )


def spec() -> LayerSpec:
    routed, shared = weights()
    facts = ExpertSpec.of(routed), ExpertSpec.of(shared)
    return LayerSpec("layers.1.mlp", HIDDEN, TOP_K, *facts, Activation(7.0), Activation(), "fp8")


def plan(backend: str, fold: str = "auto", device: str = "h200") -> LayerPlan:
    return plan_layer(spec(), FusionPolicy(fold, backend=backend), device)


def packed(plan: LayerPlan) -> PackedLayer:
    return get(plan.backend).pack(
        *weights(),
        activation=plan.spec.activation,
        shared_activation=plan.spec.shared_activation,
        activations=plan.activations,
    )


class Current:
    """``torch.cuda``'s current device, on a machine without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.index = 0
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.index)
        monkeypatch.setattr(torch.cuda, "device", lambda device: _Guard(self, device.index))


class _Guard:
    """``torch.cuda.device``."""

    def __init__(self, current: Current, index: int) -> None:
        self.current, self.index = current, index

    def __enter__(self) -> None:
        self.current.index, self.index = self.index, self.current.index

    def __exit__(self, *_: object) -> None:
        self.current.index = self.index
