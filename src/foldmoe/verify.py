"""Does what would be computed equal what the checkpoint says? Every MoE layer against the reference, folded and not.

The reference reads the checkpoint by itself. Inputs are random; routes are the layer's own, from its own router.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from foldmoe.checkpoint import CheckpointError, Headers, MoELayer, OpaqueLayer, read_headers, read_layers
from foldmoe.checkpoint.config import ModelFacts
from foldmoe.checkpoint.families import collect
from foldmoe.checkpoint.headers import INDEX_NAME
from foldmoe.checkpoint.reader import LayerTensors, read_layer
from foldmoe.checkpoint.routes import check_router, routes
from foldmoe.loading import load_layer
from foldmoe.moe.merge import slot_weights
from foldmoe.planner import FusionPolicy
from foldmoe.planner.capability import find
from foldmoe.planner.devices import torch_device
from foldmoe.reference import reference_moe, relative_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from foldmoe.layer import FoldedMoE
    from foldmoe.moe import ExpertWeights, LayerSpec
    from foldmoe.planner import LayerPlan

TOLERANCE = {"bf16": 4e-3, "fp8": 6e-3, "fp8_token": 6e-3}
"""Against the reference on the same quantised operands, by activation precision (bf16 in and out)."""

ON_HOPPER = {"fp8": 1e-2, "fp8_token": 1.5e-2}
"""The same on Hopper, whose FP8 tensor cores keep about 13 bits of a sum: over 128 columns with scales of as many, over
all of K with one scale a token. Measured on an H200: up to 9.0e-3, in layers narrower than 1024 or of a few tokens.
"""

EXACT = 2e-6
"""The same with float32 in and out and activations as they are: one wrong code or scale shows."""

AGREEMENT = 6e-3
"""Folded against unfolded: the bf16 rounding of the parts alone gives 3e-3 to 4e-3."""


class Loader(Protocol):
    """Builds the layer that is verified; :func:`foldmoe.load_layer` unless a test or an engine brings its own."""

    def __call__(self, path: Headers, layer: str, *, policy: FusionPolicy, device: torch.device | str) -> FoldedMoE: ...


@dataclass(frozen=True)
class LayerCheck:
    """What was found for one layer.

    Args:
        how: strategy and backend of the folded run.
        folded, unfolded: relative error against the reference; "folded" is the run that the policy asks for.
        shared: relative error of the shared expert alone (tokens without routes), the worse of both runs.
        agreement: folded against unfolded; judged unless the fold requantises, which makes the two differ by design.
        requantized: the fold lowered the shared expert's precision.
        tolerance: what the first three may not exceed.
        problems: why the layer fails; empty if it passes.
        skipped: the layer has a format that is not read here and nothing was computed.
        whole: this is no layer but the checkpoint, parts of which are missing.
        folds: the run that the policy asks for was folded.
        refused: why a fold that the policy names was not run; empty where it was, or none is named.
    """

    layer: str
    how: str = ""
    folded: float = 0.0
    unfolded: float = 0.0
    shared: float | None = None
    agreement: float | None = None
    requantized: bool = False
    tolerance: float = 0.0
    problems: tuple[str, ...] = ()
    skipped: bool = False
    whole: bool = False
    folds: bool = True
    refused: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    source: str | Path,
    *,
    policy: FusionPolicy | None = None,
    tokens: int = 16,
    seed: int = 0,
    device: torch.device | str | None = "cpu",
    dtype: torch.dtype | None = None,
    load: Loader = load_layer,
) -> Iterator[LayerCheck]:
    """Check every MoE layer of a local checkpoint, one result a layer as it is found.

    Layers that the index lists and no shard holds fail, and so does the whole checkpoint then, in one more result.

    Args:
        policy: of the folded run; the unfolded one is the same with ``fold="off"``.
        tokens: rows of random input, at least 1.
        seed: of the input and of hash layers' token ids, 0 to 2**64 - 1.
        device: what the layers run on; the GPU if there is one where it is None.
        dtype: of the input; float32 on a CPU and bf16 elsewhere by default.
        load: builds the layers.

    Raises:
        CheckpointError: a checkpoint that cannot be read at all.
        ValueError: no tokens, a seed out of range, a backend that nobody registered, or a device that is not here.
    """
    policy, target = policy or FusionPolicy(), torch_device(device)
    if tokens < 1 or not 0 <= seed < 2**64:
        raise ValueError(f"{tokens} tokens of seed {seed}; expected at least 1 token and a seed of 0 to 2**64 - 1")
    if policy.backend != "auto":
        find(policy.backend)
    headers = read_headers(source)
    if dtype is None:
        dtype = torch.float32 if target.type == "cpu" else torch.bfloat16
    inputs = _Inputs(ModelFacts.of(headers.config, headers.config_path), tokens, seed, dtype)
    layers = read_layers(headers)

    def checks() -> Iterator[LayerCheck]:
        for layer in layers:
            if isinstance(layer.spec, OpaqueLayer):
                yield _opaque(layer.spec)
                continue
            try:
                case = _case(layer, layer.spec, read_layer(headers, layer), inputs)
                yield _check(headers, layer, case, policy, target, load)
            except ValueError as error:
                yield LayerCheck(layer.name, problems=(str(error),))
        yield from _absent(headers, {layer.name for layer in layers})

    return checks()


def passes(checks: Sequence[LayerCheck]) -> bool:
    """No layer fails, a fold that was asked for by name was run, and something was computed at all."""
    return all(check.ok and not check.refused for check in checks) and any(not check.skipped for check in checks)


def _opaque(layer: OpaqueLayer) -> LayerCheck:
    """A format that is not known here is skipped; tensors and facts that are missing or do not fit are a failure."""
    return LayerCheck(layer.name, how=layer.reasons[0], problems=layer.damage, skipped=not layer.damage)


def _absent(headers: Headers, found: set[str]) -> Iterator[LayerCheck]:
    """Layers that only the index knows, and what else it and the shards' numbers promise."""
    for block in collect(headers.absent):
        if block.name not in found:
            names = block.names()
            problem = f"missing: the whole layer, {len(names)} tensors that {INDEX_NAME} lists (first: {names[0]})"
            yield LayerCheck(block.name, problems=(problem,))
    if headers.incomplete:
        yield LayerCheck("the checkpoint", problems=headers.incomplete, whole=True)


@dataclass(frozen=True)
class _Inputs:
    """What every layer's input is made from."""

    facts: ModelFacts
    tokens: int
    seed: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class _Case:
    """One layer's weights as the checkpoint has them, and inputs for it."""

    spec: LayerSpec
    truth: LayerTensors
    x: Tensor
    ids: Tensor
    weights: Tensor
    shared_weights: Tensor | None


@dataclass(frozen=True, eq=False)
class _Run:
    """One way of running a layer: its output, its errors, and what does not unpack to what was stored."""

    moe: FoldedMoE
    y: Tensor
    error: float
    shared_error: float
    problems: list[str]


def _check(
    headers: Headers,
    layer: MoELayer,
    case: _Case,
    policy: FusionPolicy,
    device: torch.device,
    load: Loader,
) -> LayerCheck:
    runs = [
        _run(load(headers, layer.name, policy=asked, device=device), case, device)
        for asked in (policy, replace(policy, fold="off"))
    ]
    folded, unfolded = runs
    plan = folded.moe.plan
    exact = case.x.dtype == torch.float32 and plan.activations == "bf16"
    allowed = {**TOLERANCE, **ON_HOPPER} if plan.backend == "hopper" else TOLERANCE
    tolerance = EXACT if exact else allowed[plan.activations]
    check = LayerCheck(
        layer.name,
        f"{plan.strategy if plan.folded else plan.arm} on {plan.backend}",
        folded.error,
        unfolded.error,
        max(run.shared_error for run in runs) if case.spec.shared else None,
        relative_error(folded.y, unfolded.y),
        plan.requantize,
        tolerance,
        folds=plan.folded,
        refused=_refused(plan, policy),
    )
    problems = [problem for run in runs for problem in run.problems]
    for what, found, limit in (
        (plan.arm, check.folded, tolerance),
        ("unfolded", check.unfolded, tolerance),
        ("the shared expert alone", check.shared, tolerance),
        ("folded against unfolded", None if plan.requantize else check.agreement, AGREEMENT),
    ):
        if found is not None and not found <= limit:
            problems.append(f"{what}: relative error {found:.2e}, allowed {limit:.1e}")
    return replace(check, problems=tuple(problems))


def _refused(plan: LayerPlan, policy: FusionPolicy) -> str:
    """Why the plan does not fold as the policy asks by name: what the plan says of that fold, else its last word."""
    if plan.folded or policy.fold not in ("native", "slot"):
        return ""
    return "; ".join([line for line in plan.reasons if line.startswith(f"{policy.fold}: ")] or plan.reasons[-1:])


def _run(moe: FoldedMoE, case: _Case, device: torch.device) -> _Run:
    plan, spec = moe.plan, case.spec
    routed, shared = case.truth.routed, case.truth.shared
    problems = []
    if plan.requantize and shared is not None:
        shared = slot_weights(shared, requantize=True, padded_width=None)
    for name, mine, stored in zip(("routed experts", "shared expert"), moe.unpack(), (routed, shared), strict=True):
        if not _same(mine, stored):
            problems.append(f"the {name} ({plan.strategy}) do not unpack to the stored bytes")

    def both(ids: Tensor) -> tuple[Tensor, Tensor]:
        s = case.shared_weights
        y = moe(
            case.x.to(device),
            ids.to(device),
            case.weights.to(device),
            shared_weights=None if s is None else s.to(device),
        )
        reference = reference_moe(
            case.x, ids, case.weights, routed, shared, activation=spec.activation,
            shared_activation=spec.shared_activation, shared_weights=s, activations=plan.activations,
        )  # fmt: skip
        return y.cpu(), reference

    y, reference = both(case.ids)
    alone, alone_reference = both(torch.full_like(case.ids, -1))
    return _Run(moe, y, relative_error(y, reference), relative_error(alone, alone_reference), problems)


def _same(mine: ExpertWeights | None, stored: ExpertWeights | None) -> bool:
    if mine is None or stored is None:
        return mine is stored
    for one, other in ((mine.gate_up, stored.gate_up), (mine.down, stored.down)):
        first, second = one.tensors(), other.tensors()
        if first.keys() != second.keys():
            return False
        for role, tensor in first.items():
            left, right = (t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (tensor, second[role]))
            if tensor.shape != second[role].shape or not torch.equal(left, right):
                return False
    return True


def _case(layer: MoELayer, spec: LayerSpec, truth: LayerTensors, inputs: _Inputs) -> _Case:
    random = torch.Generator().manual_seed(inputs.seed)
    x = torch.randn(inputs.tokens, spec.hidden, generator=random).to(inputs.dtype)
    router = truth.router
    if "weight" not in router:
        raise CheckpointError(f"{layer.name}: missing: gate.weight, without which no token finds its experts")
    check_router(layer, router, spec.routed.count)
    ids, weights = routes(x, router, spec.top_k, inputs.facts, random)
    gate = router.get("shared_gate")
    s = None if gate is None else torch.sigmoid(x.float() @ gate.float().flatten())
    return _Case(spec, truth, x, ids, weights, s)
