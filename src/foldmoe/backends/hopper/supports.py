"""What the Hopper launch can run, and how many bytes it packs a layer into."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foldmoe.backends.hopper.pack import padded
from foldmoe.backends.hopper.pack_fp8 import scale_groups
from foldmoe.formats import Format

if TYPE_CHECKING:
    from foldmoe.moe.spec import ActivationPrecision, ExpertSpec, LayerSpec

MAX_TOP_K = 128
"""A token's routes are counted in one block of the prologue."""

MAX_EXPERTS = 1024
"""Counted in one histogram."""


def reasons(spec: LayerSpec, activations: ActivationPrecision) -> tuple[str, ...]:
    """Why the launch cannot run ``spec``; empty if it can. What only the weights tell (spans) is checked on packing."""
    found = []
    routed, shared = spec.routed, spec.shared
    if routed.format is Format.BF16:
        if activations != "bf16":
            found.append(f"activations {activations}: the launch multiplies bf16 weights by bf16")
        found += _float_reasons("routed", routed)
    elif activations == "bf16":
        found.append(f"activations {activations}: the launch multiplies E4M3 by E4M3 (fp8 or fp8_token)")
    if routed.format.fp8:
        found += _block_reasons("routed", routed)
    elif routed.format not in (Format.MXFP4, Format.BF16):
        found.append(f"routed experts in {routed.format.value}; the launch multiplies mxfp4, block FP8 or bf16")
    if not routed.count:
        found.append("a rank has no routed experts")
    if routed.count > MAX_EXPERTS:
        found.append(f"{routed.count} routed experts on one rank; at most {MAX_EXPERTS}")
    if spec.top_k > MAX_TOP_K:
        found.append(f"{spec.top_k} routes a token; at most {MAX_TOP_K}")
    if not (spec.activation.is_silu and spec.shared_activation.is_silu):
        found.append(f"{spec.activation}, shared {spec.shared_activation}; the launch computes silu(gate) * up")
    if spec.hidden % 128:
        found.append(f"hidden size {spec.hidden} is not a multiple of 128")
    if routed.width % 32:
        found.append(f"routed width {routed.width} is not a multiple of 32")
    if shared is not None:
        found += _shared_reasons(routed, shared)
    return tuple(found)


def _shared_reasons(routed: ExpertSpec, shared: ExpertSpec) -> list[str]:
    found = []
    if shared.count != 1:
        found.append(f"{shared.count} shared experts; the launch folds one (store them as one wider expert)")
    if routed.format is Format.BF16:
        if shared.format is not Format.BF16:
            found.append(f"shared expert in {shared.format.value} beside bf16 routed experts; both must be bf16")
        found += _float_reasons("shared", shared)
    elif not shared.format.fp8:
        found.append(f"shared expert in {shared.format.value}; the launch folds block FP8")
    else:
        found += _block_reasons("shared", shared)
    if shared.width % 32:
        found.append(f"shared width {shared.width} is not a multiple of 32")
    return found


def _float_reasons(which: str, experts: ExpertSpec) -> list[str]:
    if experts.float16:
        return [f"{which} experts in float16; the launch multiplies bfloat16"]
    if experts.format is Format.BF16 and experts.float_bytes != 2:
        return [f"{which} experts in floats of {experts.float_bytes} bytes; the launch multiplies bfloat16"]
    return []


def _block_reasons(which: str, experts: ExpertSpec) -> list[str]:
    rows, columns = experts.block
    if rows % 8 or columns % 32:
        return [f"{which} scale blocks of {rows}x{columns}; rows must be a multiple of 8, columns of 32"]
    return []


def packed_nbytes(spec: LayerSpec) -> int:
    """Bytes of the packed layer, zero tails of short blocks and steps included."""
    hidden, routed = spec.hidden, spec.routed
    if routed.format is Format.MXFP4:
        total = routed.count * (_mxfp4(2 * routed.width, hidden) + _mxfp4(hidden, routed.width))
    else:
        total = _whole(routed, hidden)
    return total + (_whole(spec.shared, hidden) if spec.shared is not None else 0)


def _mxfp4(rows: int, columns: int) -> int:
    elements = _elements(rows, columns)
    return elements // 2 + elements // 32 + -(-rows // 256) * 256 * 4


def _whole(experts: ExpertSpec, hidden: int) -> int:
    """Of a set in bf16 or FP8: values, the kernel's scales, and the stored scales, kept."""
    if experts.format is Format.BF16:
        return 2 * experts.count * (_elements(2 * experts.width, hidden) + _elements(hidden, experts.width))
    groups = scale_groups(experts.block[1])
    size = _fp8(2 * experts.width, hidden, groups) + _fp8(hidden, experts.width, groups)
    return experts.count * (size + experts.nbytes(hidden) - 3 * hidden * experts.width)


def _fp8(rows: int, columns: int, groups: int) -> int:
    elements = _elements(rows, columns)
    return elements + elements // (8 * 128 // groups) * 4


def _elements(rows: int, columns: int) -> int:
    return -(-rows // 256) * 256 * padded(columns)
