"""What the Hopper launch can run, and how many bytes it packs a layer into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foldmoe.backends.hopper.pack import padded
from foldmoe.formats import Format

if TYPE_CHECKING:
    from foldmoe.moe.spec import ActivationPrecision, ExpertSpec, LayerSpec

MAX_EXPERTS = 1024
"""Counted in one histogram."""


def reasons(spec: LayerSpec, activations: ActivationPrecision) -> tuple[str, ...]:
    """Why the launch cannot run ``spec``; empty if it can. What only the weights tell (spans) is checked on packing."""
    found = []
    routed, shared = spec.routed, spec.shared
    if activations == "bf16":
        found.append(f"activations {activations}: the launch multiplies E4M3 by E4M3 (fp8 or fp8_token)")
    if routed.format is not Format.MXFP4:
        found.append(f"routed experts in {routed.format.value}; the launch upcasts mxfp4")
    if not routed.count:
        found.append("no routed experts on this rank")
    if routed.count > MAX_EXPERTS:
        found.append(f"{routed.count} routed experts on one rank; at most {MAX_EXPERTS}")
    if not (spec.activation.is_silu and spec.shared_activation.is_silu):
        found.append(f"{spec.activation}, shared {spec.shared_activation}; the launch computes silu(gate) * up")
    if spec.hidden % 128:
        found.append(f"hidden size {spec.hidden} is not a multiple of 128")
    if routed.width % 32:
        found.append(f"routed width {routed.width} is not a multiple of 32")
    if shared is not None:
        found += _shared_reasons(shared)
    return tuple(found)


def _shared_reasons(shared: ExpertSpec) -> list[str]:
    found = []
    if shared.count != 1:
        found.append(f"{shared.count} shared experts; the launch folds one (store them as one wider expert)")
    if not shared.format.fp8:
        found.append(f"shared expert in {shared.format.value}; the launch folds block FP8")
    elif shared.block[0] % 8 or shared.block[1] % 32:
        found.append(
            f"shared scale blocks of {shared.block[0]}x{shared.block[1]}; rows must be a multiple of 8, columns of 32"
        )
    if shared.width % 32:
        found.append(f"shared width {shared.width} is not a multiple of 32")
    return found


def packed_nbytes(spec: LayerSpec) -> int:
    """Bytes of the packed layer, zero tails of short blocks and steps included."""
    hidden, routed, shared = spec.hidden, spec.routed, spec.shared
    total = routed.count * (_routed(2 * routed.width, hidden) + _routed(hidden, routed.width))
    if shared is not None:
        groups = 1 if shared.block[1] % 128 == 0 else 4
        total += _shared(2 * shared.width, hidden, groups) + _shared(hidden, shared.width, groups)
        total += shared.nbytes(hidden) - 3 * hidden * shared.width  # the stored scales, kept
    return total


def _routed(rows: int, columns: int) -> int:
    elements = -(-rows // 256) * 256 * padded(columns)
    return elements // 2 + elements // 32 + -(-rows // 256) * 256 * 4


def _shared(rows: int, columns: int, groups: int) -> int:
    elements = -(-rows // 256) * 256 * padded(columns)
    return elements + elements // (8 * 128 // groups) * 4
