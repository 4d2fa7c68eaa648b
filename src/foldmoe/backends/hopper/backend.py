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
        """Everywhere, but not from 17 to 64 tokens where a rank holds 128 experts or more: with 256 (V4-Flash on one
        H200), two streams took 1 to 2 % less at 32 tokens in three runs; with 32 and 48, folding did.

        Args:
            spec: the part of the rank with the most experts, so that all ranks fold alike.
        """
        return ((0, 17), (65, None)) if spec.routed.count >= 128 else ((0, None),)

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
