"""The Triton backend as planner and front door see it. Importing this file does not need Triton."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from foldmoe.backends.base import Backend, PackedLayer
from foldmoe.backends.triton.limits import refusals

if TYPE_CHECKING:
    from foldmoe.moe import Activation, ExpertWeights, LayerSpec
    from foldmoe.moe.spec import ActivationPrecision
    from foldmoe.planner.devices import Device
    from foldmoe.planner.plan import Rows

OLDEST_ARCH = 80
"""Ampere: bf16 tensor cores."""

FOLD_BELOW = 32
"""Tokens from which the shared expert runs faster on a second stream."""


@cache
def _installed() -> bool:
    return find_spec("triton") is not None


class TritonBackend(Backend):
    """Grouped GEMMs over the weights as stored, on any CUDA or ROCm device."""

    name: ClassVar[str] = "triton"
    deterministic: ClassVar[bool] = True

    def unavailable(self, device: Device) -> str | None:
        if not _installed():
            return "triton is not installed: pip install 'foldmoe[gpu]'"
        if device.kind == "cpu":
            interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
            return None if interpreted else "needs a CUDA or ROCm device"
        if device.kind == "cuda" and device.arch is not None and int(device.arch.removeprefix("sm_")) < OLDEST_ARCH:
            return f"needs sm_{OLDEST_ARCH} or later, found {device.arch}"
        return None

    def supports(self, spec: LayerSpec, activations: ActivationPrecision) -> tuple[str, ...]:
        return refusals(spec, activations)

    def outline(self, spec: LayerSpec, activations: ActivationPrecision, device: Device) -> PackedLayer:
        from foldmoe.backends.triton.outline import outline

        return outline(spec, activations, device)

    def fold_rows(self, spec: LayerSpec, device: Device) -> tuple[Rows, ...]:
        """Below 32 tokens on a GPU. From there on one grid of routed and shared tiles was .6 to 2.2 % slower than the
        shared expert on a second stream, on an H200 with DeepSeek-V4-Flash's shape; other GPUs are taken to be alike.
        """
        return ((0, None),) if device.kind == "cpu" else ((0, FOLD_BELOW),)

    def pack(
        self,
        routed: ExpertWeights,
        shared: ExpertWeights | None,
        *,
        activation: Activation,
        shared_activation: Activation,
        activations: ActivationPrecision,
        consume: bool = False,
    ) -> PackedLayer:
        from foldmoe.backends.triton.layer import TritonLayer
        from foldmoe.backends.triton.layout import pack

        return TritonLayer(
            pack(routed, "routed"),
            pack(shared, "shared") if shared else None,
            activation,
            shared_activation,
            activations,
        )
