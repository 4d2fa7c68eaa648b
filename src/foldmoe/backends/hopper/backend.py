"""The Hopper backend as planner and front door see it. Importing this file does not need Triton."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from foldmoe.backends.base import Backend, PackedLayer
from foldmoe.backends.hopper import supports, tuned

if TYPE_CHECKING:
    from foldmoe.moe import Activation, ExpertWeights, LayerSpec
    from foldmoe.moe.spec import ActivationPrecision
    from foldmoe.planner.devices import Device
    from foldmoe.planner.plan import Rows


_MANY, _SMS = 128, 132
"""Experts of a rank from which folding was not always faster; SMs of an H200."""


@cache
def _missing() -> str | None:
    """What has to be installed."""
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'foldmoe[gpu]'"
    try:
        gluon = find_spec("triton.experimental.gluon")
    except ModuleNotFoundError:
        gluon = None
    return None if gluon else "this triton has no Gluon: it needs 3.6 or later"


class HopperBackend(Backend):
    """MXFP4 or block-FP8 experts with a block-FP8 shared one, bf16 with bf16: one persistent launch on sm_90."""

    name: ClassVar[str] = "hopper"
    deterministic: ClassVar[bool] = True

    def unavailable(self, device: Device) -> str | None:
        if not device.is_hopper:
            found = device.arch or device.name
            return f"needs a Hopper GPU (sm_90), found {found}"
        return _missing()

    def supports(self, spec: LayerSpec, activations: ActivationPrecision) -> tuple[str, ...]:
        return supports.reasons(spec, activations)

    def packed_nbytes(self, spec: LayerSpec) -> int:
        return supports.packed_nbytes(spec)

    def outline(self, spec: LayerSpec, activations: ActivationPrecision, device: Device) -> PackedLayer:
        from foldmoe.backends.hopper.layer import HopperLayer
        from foldmoe.backends.hopper.outline import outline

        shared = spec.shared.format if spec.shared else None
        return HopperLayer(outline(spec, activations, device.name), {}, spec.routed.format, shared)

    def tiles(self, spec: LayerSpec, device: Device) -> str:
        return tuned.describe(spec, device.name)

    def fold_rows(self, spec: LayerSpec, device: Device) -> tuple[Rows, ...]:
        """Everywhere, but where a rank holds 128 experts or more, by what an H200 measured:

        - MXFP4: not from 17 to 64 tokens. Two streams took .2 to 2 % less at 32 (V4-Flash on one card); with 32 and 48
          experts folding did.
        - FP8 and bf16: not one token, if its down tiles are more than the SMs only with the shared expert's among them.
          Two streams took 3 to 5 % less with 128 and 16 of them (GLM-4.5-Air), folding 3 to 10 % less with 80 and 8
          (Qwen3-Next), 160 and 20 (GLM-4.5) and 224 and 28 (DeepSeek-V3).

        Args:
            spec: the part of the rank with the most experts, so that all ranks fold alike.
        """
        if spec.routed.count < _MANY:
            return ((0, None),)
        if spec.routed.format.packed:
            return ((0, 17), (65, None))
        tiles = -(-spec.hidden // 256)
        return ((2, None),) if spec.top_k * tiles <= _SMS < (spec.top_k + 1) * tiles else ((0, None),)

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
        """See :meth:`foldmoe.backends.base.Backend.pack`.

        Raises:
            Unsupported: for scales that the layout cannot express exactly. Nothing has been written over by then.
            ValueError: for a NaN scale.
        """
        from foldmoe.backends.hopper.layer import HopperLayer
        from foldmoe.backends.hopper.packing import pack_layer

        weights = pack_layer(routed, shared, activation, shared_activation, activations=activations, consume=consume)
        stored = {"up": routed.gate_up, "down": routed.down}
        dtypes = {role: tensor.values.dtype for role, tensor in stored.items()}
        dtypes |= {f"{role}_scales": t.scales.dtype for role, t in stored.items() if t.scales is not None}
        return HopperLayer(weights, dtypes, routed.format, shared.format if shared else None)
