"""``plan_layer``: from a layer's facts to the one decision about it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foldmoe.moe.spec import ActivationPrecision, ExpertSpec, LayerSpec, Placement
from foldmoe.planner import capability
from foldmoe.planner.devices import Device, resolve
from foldmoe.planner.plan import LayerPlan, Rows
from foldmoe.planner.policy import FusionPolicy

if TYPE_CHECKING:
    import torch

    from foldmoe.planner.capability import Capability


def plan_layer(
    spec: LayerSpec,
    policy: FusionPolicy | None = None,
    device: Device | torch.device | str | None = None,
    placement: Placement | None = None,
) -> LayerPlan:
    """Decide how one layer runs.

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
    try:
        local = spec.local(placement)
    except ValueError as error:
        return _plan(
            spec,
            placement,
            activations,
            strategy="serial",
            arm="stock",
            backend="stock",
            reasons=(*reasons, f"tensor parallel: {error}"),
        )
    common: dict[str, Any] = {"bytes_before": local.nbytes, "bytes_after": local.nbytes}
    if policy.fold == "stock":
        return _plan(
            spec,
            placement,
            activations,
            strategy="serial",
            arm="stock",
            backend="stock",
            reasons=("the policy leaves the engine's own layer in place",),
            **common,
        )
    obstacles = slot_obstacles(spec, policy) if policy.fold == "slot" else ()
    run = _slotted(local) if policy.fold == "slot" and not obstacles else local
    backend, refused = _choose(run, activations, policy, found)
    reasons += refused
    if backend is None:
        return _plan(
            spec,
            placement,
            activations,
            strategy="serial",
            arm="stock",
            backend="stock",
            reasons=(*reasons, "no backend of ours runs this layer: the engine keeps it"),
            **common,
        )
    common |= {"bytes_after": backend.packed_nbytes(run), "tiles": backend.tiles(run, found)}
    if spec.shared is None:
        return _plan(
            spec,
            placement,
            activations,
            strategy="serial",
            arm="serial",
            backend=backend.name,
            reasons=(*reasons, "the layer has no shared expert: nothing to fold"),
            **common,
        )
    if policy.fold in ("off", "dual"):
        arm = "serial" if policy.fold == "off" else "dual-stream"
        return _plan(
            spec,
            placement,
            activations,
            strategy="serial",
            arm=arm,
            backend=backend.name,
            reasons=(*reasons, f"the policy asks for the shared expert {_WHERE[policy.fold]}"),
            **common,
        )
    if policy.fold in ("auto", "native"):
        rows = backend.fold_rows(local, found) if policy.fold == "auto" else EVERYWHERE  # asked for by name: always
        return _plan(
            spec,
            placement,
            activations,
            strategy="native",
            arm="folded",
            backend=backend.name,
            reasons=(*reasons, *_about_rows(backend, rows)),
            fold_rows=rows,
            **common,
        )
    if obstacles:
        return _plan(
            spec,
            placement,
            activations,
            strategy="serial",
            arm="serial",
            backend=backend.name,
            reasons=(*reasons, *(f"slot: {o}" for o in obstacles)),
            **common,
        )
    return _plan(
        spec,
        placement,
        activations,
        strategy="slot",
        arm="folded",
        backend=backend.name,
        reasons=reasons,
        requantize=spec.shared.format is not spec.routed.format,
        fold_rows=EVERYWHERE,  # the shared expert is a routed one now: nothing is left to run beside
        padded_width=local.routed.width if spec.shared.width < spec.routed.width else None,
        **common,
    )


def _slotted(spec: LayerSpec) -> LayerSpec:
    """The layer with its shared expert as one more routed one."""
    return replace(spec, routed=replace(spec.routed, count=spec.routed.count + 1), shared=None)


EVERYWHERE: tuple[Rows, ...] = ((0, None),)
"""``fold_rows`` of a layer that folds at any number of tokens."""


def _about_rows(backend: Capability, rows: tuple[Rows, ...]) -> tuple[str, ...]:
    """A line where the backend folds at some batch sizes only."""
    if rows in ((), EVERYWHERE):
        return ()
    ranges = ", ".join(f"{start} or more" if end is None else f"{start} to {end - 1}" for start, end in rows)
    reason = (
        f"folds at {ranges} tokens; otherwise two streams over the same weights, which measured faster (native by name "
        "folds always)"
    )
    return (f"{backend.name}: {reason}",)


_WHERE = {"off": "after the routed experts", "dual": "on a second stream"}


def _plan(spec: LayerSpec, placement: Placement, activations: ActivationPrecision, **decided: Any) -> LayerPlan:
    return LayerPlan(spec=spec, placement=placement, activations=activations, **decided)


def _precision(spec: LayerSpec, policy: FusionPolicy) -> tuple[ActivationPrecision, tuple[str, ...]]:
    """The activation precision, and a line where it is not the checkpoint's own."""
    if policy.activations == "checkpoint" or policy.activations == spec.activations:
        return spec.activations, ()
    asked = f"activations {policy.activations} as asked; the checkpoint declares {spec.activations}"
    return policy.activations, (asked,)


def _choose(
    spec: LayerSpec, activations: ActivationPrecision, policy: FusionPolicy, device: Device
) -> tuple[Capability | None, tuple[str, ...]]:
    """The first backend that runs ``spec``, and why each one before it does not."""
    asked = (capability.find(policy.backend),) if policy.backend != "auto" else capability.registered()
    reasons: list[str] = []
    for candidate in asked:
        missing = candidate.unavailable(device)
        against = (missing,) if missing else candidate.supports(spec, activations)
        if not against:
            return candidate, tuple(reasons)
        reasons += [f"{candidate.name}: {reason}" for reason in against]
    return None, tuple(reasons)


def without_backend(plan: LayerPlan, reason: str, device: Device | torch.device | str | None = None) -> LayerPlan:
    """The same plan on the next backend that runs the layer, where ``plan.backend`` found at packing that it cannot.

    Headers do not tell everything: the span of a row's scales stands in the weights.

    Args:
        reason: why the backend refused.

    Raises:
        ValueError: if no other backend runs the layer.
    """
    found, local = resolve(device), plan.spec.local(plan.placement)
    if plan.strategy == "slot":
        local = _slotted(local)
    reasons = [*plan.reasons, f"{plan.backend}: {reason}"]
    names = [candidate.name for candidate in capability.registered()]
    for candidate in capability.registered()[names.index(plan.backend) + 1 :]:
        missing = candidate.unavailable(found)
        against = (missing,) if missing else candidate.supports(local, plan.activations)
        if not against:
            native = plan.folded and plan.strategy == "native"
            rows = candidate.fold_rows(local, found) if native else plan.fold_rows
            reasons += _about_rows(candidate, rows)
            return replace(
                plan,
                backend=candidate.name,
                reasons=tuple(reasons),
                fold_rows=rows,
                bytes_after=candidate.packed_nbytes(local),
                tiles=candidate.tiles(local, found),
            )
        reasons += [f"{candidate.name}: {line}" for line in against]
    raise ValueError(f"{plan.layer}: no backend runs this layer: {'; '.join(reasons)}")


def slot_obstacles(spec: LayerSpec, policy: FusionPolicy) -> tuple[str, ...]:
    """Why the shared expert cannot take a routed expert's slot; empty if it can."""
    routed, shared = spec.routed, spec.shared
    if shared is None:
        return ("the layer has no shared expert",)
    found = []
    if shared.width > routed.width:
        found.append(f"the shared expert is {shared.width} wide, a routed slot {routed.width}")
    if shared.format is not routed.format:
        change = f"{shared.format.value} -> {routed.format.value}"
        if routed.format.value != "mxfp4":
            found.append(f"requantising {change} is not supported, only to mxfp4")
        elif not policy.allow_requantize:
            found.append(f"requantising {change} lowers precision; ask for it by name (--allow-requantize)")
    elif _storage(shared) != _storage(routed):
        found.append(f"stored differently: shared {shared}, routed {routed}")
    if spec.activation != spec.shared_activation:
        found.append(f"activations differ: shared {spec.shared_activation}, routed {spec.activation}")
    return tuple(found)


def _storage(spec: ExpertSpec) -> tuple[object, ...]:
    return spec.block, spec.e8m0_scales, spec.float_bytes
