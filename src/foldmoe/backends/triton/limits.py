"""What the kernels take, said before any weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from foldmoe.backends.triton.layout import whole_steps
from foldmoe.formats import Format
from foldmoe.moe.spec import ActivationPrecision

if TYPE_CHECKING:
    from foldmoe.moe.spec import ExpertSpec, LayerSpec

STEP = 32
"""Widths and hidden sizes are multiples of this: whole scale groups, whole 16-byte rows, whole K steps of a dot."""

MAX_EXPERTS = 2048
"""The sort compares 32 routes with all experts at once; more do not fit in a program's registers."""

FORMATS = (Format.MXFP4, Format.FP8_128x128, Format.FP8_32x32, Format.MXFP8, Format.BF16)


def refusals(spec: LayerSpec, activations: ActivationPrecision) -> tuple[str, ...]:
    """Why the kernels cannot run ``spec`` as stored; empty if they can."""
    reasons = []
    if activations not in get_args(ActivationPrecision):
        reasons.append(f"activations {activations!r} are not known")
    if not (spec.activation.is_silu and spec.shared_activation.is_silu):
        reasons.append(f"{spec.activation}, shared {spec.shared_activation}; the kernels compute silu(gate) * up")
    if spec.hidden % STEP:
        reasons.append(f"hidden size {spec.hidden} is no multiple of {STEP}")
    reasons += _refusals("routed", spec.routed, spec.hidden)
    if spec.routed.count > MAX_EXPERTS:
        reasons.append(f"{spec.routed.count} routed experts; the route sort takes up to {MAX_EXPERTS}")
    if spec.shared is not None:
        reasons += _refusals("shared", spec.shared, spec.hidden)
        if spec.shared.count != 1:
            reasons.append(f"expected one shared expert, found {spec.shared.count}")
    return tuple(reasons)


def _refusals(which: str, experts: ExpertSpec, hidden: int) -> list[str]:
    reasons = []
    if experts.format not in FORMATS:
        reasons.append(
            f"{which} experts are {experts.format.value}; the kernels read {', '.join(f.value for f in FORMATS)}"
        )
        return reasons
    if experts.width % STEP:
        reasons.append(f"{which} width {experts.width} is no multiple of {STEP}")
    if experts.format.fp8 and (columns := experts.block[1]) % STEP:
        reasons.append(f"{which} scales cover {columns} columns, no multiple of {STEP}")
    elif experts.format.fp8 and not whole_steps(columns, planes=2):
        reasons.append(f"{which} scales cover {columns} columns, which no K step of the kernels divides")
    if experts.float16:
        reasons.append(f"{which} experts are stored in float16; the kernels read bfloat16")
    elif experts.format is Format.BF16 and experts.float_bytes != 2:
        reasons.append(f"{which} experts are stored in {8 * experts.float_bytes}-bit floats; the kernels read bfloat16")
    if 2 * experts.width * hidden >= 2**31:
        reasons.append(f"one {which} expert has {2 * experts.width * hidden} gate and up weights, the limit is 2**31")
    return reasons
