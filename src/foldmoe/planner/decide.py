"""``plan_layer``: from a layer's facts to the one decision about it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from foldmoe.moe.spec import ActivationPrecision, ExpertSpec, LayerSpec, Placement
from foldmoe.planner import capability
from foldmoe.planner.devices import Device, resolve
from foldmoe.planner.plan import Arm, LayerPlan, Rows
from foldmoe.planner.policy import FusionPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from foldmoe.planner.capability import Capability


def plan_layer(
    spec: LayerSpec,
    policy: FusionPolicy | None = None,
    device: Device | torch.device | str | None = None,
    placement: Placement | None = None,
) -> LayerPlan:
    """Decide how one layer runs.

    All ranks decide alike: a backend is taken where it runs every rank's part, that of a rank without experts included,
    and folds at the token counts that it states for the largest part.

    Args:
        spec: the whole layer, over all ranks.
        policy: what the user asks for; the default folds wherever the stored precision can be kept.
        device: see :func:`foldmoe.planner.devices.resolve`.
        placement: where this rank stands; alone by default.

    Returns:
        A plan; what could not be had stands in its ``reasons``. Nothing is raised for a layer that cannot fold.

    Raises:
        ValueError: for an unknown device or backend.
    """
    policy, placement = policy or FusionPolicy(), placement or Placement()
    found = resolve(device)
    activations, reasons = _precision(spec, policy)
    plan = partial(LayerPlan, spec, activations=activations, placement=placement, policy=policy)
    stock = partial(plan, strategy="serial", arm="stock", backend="stock")
    try:
        local, parts = spec.local(placement), _parts(spec, placement)
    except ValueError as error:
        return stock(reasons=(*reasons, f"tensor parallel: {error}"))
    stock = partial(stock, bytes_before=local.nbytes, bytes_after=local.nbytes)
    if policy.fold == "stock":
        return stock(reasons=("the policy leaves the engine's own layer in place",))
    obstacles = slot_obstacles(local, policy) if policy.fold == "slot" else ()
    as_packed = slotted if policy.fold == "slot" and not obstacles else _as_it_is
    asked = (capability.find(policy.backend),) if policy.backend != "auto" else capability.registered()
    backend, refused = _first(asked, map(as_packed, parts), activations, found)
    reasons += refused
    if backend is None:
        return stock(reasons=(*reasons, "no backend of ours runs this layer: the engine keeps it"))
    ours = partial(
        plan,
        backend=backend.name,
        bytes_before=local.nbytes,
        bytes_after=backend.packed_nbytes(as_packed(local)),
        tiles=backend.tiles(as_packed(local), found),
    )
    serial = partial(ours, strategy="serial", arm="serial")
    if spec.shared is None:
        return serial(reasons=(*reasons, "the layer has no shared expert: nothing to fold"))
    if policy.fold in _UNFOLDED:
        arm, where = _UNFOLDED[policy.fold]
        return ours(strategy="serial", arm=arm, reasons=(*reasons, f"the policy asks for the shared expert {where}"))
    if policy.fold in ("auto", "native"):
        rows = _fold_rows(backend, parts[0], policy, found)
        reasons += _about_rows(backend.name, rows)
        return ours(strategy="native", arm="folded", reasons=reasons, fold_rows=rows)
    if obstacles:
        return serial(reasons=(*reasons, *(f"slot: {obstacle}" for obstacle in obstacles)))
    return ours(
        strategy="slot",
        arm="folded",
        reasons=reasons,
        requantize=spec.shared.format is not spec.routed.format,
        padded_width=local.routed.width if spec.shared.width < spec.routed.width else None,
        fold_rows=EVERYWHERE,  # the shared expert is a routed one now: nothing is left to run beside
    )


_UNFOLDED: dict[str, tuple[Arm, str]] = {
    "off": ("serial", "after the routed experts"),
    "dual": ("dual-stream", "on a second stream"),
}
"""Arms that are asked for, and where the shared expert then runs."""


def slotted(spec: LayerSpec) -> LayerSpec:
    """The layer with its shared expert as one more routed one."""
    return replace(spec, routed=replace(spec.routed, count=spec.routed.count + 1), shared=None)


def _as_it_is(spec: LayerSpec) -> LayerSpec:
    """The layer with its shared expert apart."""
    return spec


def _parts(spec: LayerSpec, placement: Placement) -> tuple[LayerSpec, ...]:
    """What ranks hold, the most experts first: one part, or two where experts do not divide evenly."""
    ends = (0, placement.ep_size - 1)
    return tuple(dict.fromkeys(spec.local(replace(placement, ep_rank=rank)) for rank in ends))


EVERYWHERE: tuple[Rows, ...] = ((0, None),)
"""``fold_rows`` of a layer that folds at any number of tokens."""


def _fold_rows(backend: Capability, largest: LayerSpec, policy: FusionPolicy, device: Device) -> tuple[Rows, ...]:
    """Of a native fold; asked for by name, it is always one."""
    return backend.fold_rows(largest, device) if policy.fold == "auto" else EVERYWHERE


def _about_rows(backend: str, rows: tuple[Rows, ...]) -> tuple[str, ...]:
    """A line where the backend folds at some batch sizes only."""
    if rows in ((), EVERYWHERE):
        return ()
    ranges = ", ".join(f"{start} or more" if end is None else f"{start} to {end - 1}" for start, end in rows)
    reason = (
        f"folds at {ranges} tokens; otherwise two streams over the same weights, which measured faster on an H200 "
        "(native by name folds always)"
    )
    return (f"{backend}: {reason}",)


def _precision(spec: LayerSpec, policy: FusionPolicy) -> tuple[ActivationPrecision, tuple[str, ...]]:
    """The activation precision, and a line where it is not the checkpoint's own."""
    if policy.activations == "checkpoint" or policy.activations == spec.activations:
        return spec.activations, ()
    asked = f"activations {policy.activations} as asked; the checkpoint declares {spec.activations}"
    return policy.activations, (asked,)


def _first(
    candidates: Iterable[Capability], parts: Iterable[LayerSpec], activations: ActivationPrecision, device: Device
) -> tuple[Capability | None, tuple[str, ...]]:
    """The first backend that runs all ``parts``, and why each one before it does not."""
    reasons: list[str] = []
    parts = tuple(parts)
    for candidate in candidates:
        missing = candidate.unavailable(device)
        against = [missing] if missing else [why for part in parts for why in candidate.supports(part, activations)]
        if not against:
            return candidate, tuple(reasons)
        reasons += [f"{candidate.name}: {why}" for why in dict.fromkeys(against)]
    return None, tuple(reasons)


def without_backend(plan: LayerPlan, reason: str, device: Device | torch.device | str | None = None) -> LayerPlan:
    """The same plan on the next backend that runs the layer, where ``plan.backend`` found at packing that it cannot.

    Headers do not tell everything: the span of a row's scales stands in the weights.

    Args:
        reason: why the backend refused.

    Raises:
        ValueError: if no other backend runs the layer, or the policy named this one: then no other is asked, as in
            :func:`plan_layer`.
    """
    found, parts = resolve(device), _parts(plan.spec, plan.placement)
    as_packed = slotted if plan.strategy == "slot" else _as_it_is
    backends = capability.registered()
    behind = [backend.name for backend in backends].index(plan.backend) + 1
    named = plan.policy.backend != "auto"
    backend, refused = _first(() if named else backends[behind:], map(as_packed, parts), plan.activations, found)
    gone = _about_rows(plan.backend, plan.fold_rows)
    reasons = (*(line for line in plan.reasons if line not in gone), f"{plan.backend}: {reason}", *refused)
    if backend is None:
        also = (f"{plan.backend} was asked for by name, so that no other is tried",) if named else ()
        raise ValueError(f"{plan.layer}: no backend runs this layer: {'; '.join((*reasons, *also))}")
    native = plan.folded and plan.strategy == "native"
    rows = _fold_rows(backend, parts[0], plan.policy, found) if native else plan.fold_rows
    local = as_packed(plan.spec.local(plan.placement))
    return replace(
        plan,
        backend=backend.name,
        reasons=(*reasons, *_about_rows(backend.name, rows)),
        fold_rows=rows,
        bytes_after=backend.packed_nbytes(local),
        tiles=backend.tiles(local, found),
    )


def slot_obstacles(spec: LayerSpec, policy: FusionPolicy) -> tuple[str, ...]:
    """Why the shared expert cannot take a routed expert's slot; empty if it can.

    Args:
        spec: the part that a rank holds, for a cut of the width can leave the two sets on different scale blocks; all
            ranks' parts answer alike.
        policy: whether the shared expert may be requantised.
    """
    routed, shared = spec.routed, spec.shared
    if shared is None:
        return ("the layer has no shared expert",)
    found = []
    in_slot = shared
    if shared.width > routed.width:
        found.append(f"the shared expert is {shared.width} wide, a routed slot {routed.width}")
    if shared.format is not routed.format:
        change = f"{shared.format.value} -> {routed.format.value}"
        if routed.format.value != "mxfp4":
            found.append(f"requantising {change} is not supported, only to mxfp4")
        elif not policy.allow_requantize:
            found.append(f"requantising {change} lowers precision; ask for it by name (--allow-requantize)")
        elif shared.width % 2:
            found.append(f"requantising {change} puts two columns into a byte; the shared width is odd, {shared.width}")
        else:
            in_slot = ExpertSpec(shared.count, shared.width, routed.format)
    if in_slot.format is routed.format and _storage(in_slot) != _storage(routed):
        found.append(f"stored differently: shared {_in_blocks(in_slot)}, routed {_in_blocks(routed)}")
    if spec.activation != spec.shared_activation:
        found.append(f"activations differ: shared {spec.shared_activation}, routed {spec.activation}")
    return tuple(found)


def _storage(spec: ExpertSpec) -> tuple[object, ...]:
    return spec.block, spec.e8m0_scales, spec.float_bytes, spec.float16


def _in_blocks(spec: ExpertSpec) -> str:
    return f"{spec} in {spec.block[0]}x{spec.block[1]} blocks"
