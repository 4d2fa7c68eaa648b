"""Does what would be computed equal what the checkpoint says? Every MoE layer against the reference, folded and not.

The reference reads the checkpoint by itself. Inputs are random; routes are the layer's own, from its own router.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from foldmoe.checkpoint import CheckpointError, Headers, MoELayer, OpaqueLayer, read_headers, read_layers
from foldmoe.checkpoint.config import ModelFacts
from foldmoe.checkpoint.reader import LayerTensors, read_layer
from foldmoe.loading import load_layer
from foldmoe.moe import routing
from foldmoe.moe.merge import slot_weights
from foldmoe.planner import FusionPolicy
from foldmoe.reference import reference_moe, relative_error

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from foldmoe.layer import FoldedMoE
    from foldmoe.moe import ExpertWeights, LayerSpec

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
        folded, unfolded: relative error against the reference.
        shared: relative error of the shared expert alone (tokens without routes), the worse of both runs.
        agreement: folded against unfolded; judged unless the fold requantises, which makes the two differ by design.
        requantized: the fold lowered the shared expert's precision.
        tolerance: what the first three may not exceed.
        problems: why the layer fails; empty if it passes.
        skipped: the layer is not read here and nothing was computed.
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

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    source: str | Path,
    *,
    policy: FusionPolicy | None = None,
    tokens: int = 16,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    load: Loader = load_layer,
) -> Iterator[LayerCheck]:
    """Check every MoE layer of a local checkpoint, one result a layer as it is found.

    Args:
        policy: of the folded run; the unfolded one is the same with ``fold="off"``.
        tokens: rows of random input.
        dtype: of the input; float32 on a CPU and bf16 elsewhere by default.
        load: builds the layers.

    Raises:
        CheckpointError: a checkpoint that cannot be read at all.
    """
    headers = read_headers(source)
    facts = ModelFacts.of(headers.config)
    if dtype is None:
        dtype = torch.float32 if torch.device(device).type == "cpu" else torch.bfloat16
    for layer in read_layers(headers):
        random = torch.Generator().manual_seed(seed)
        if isinstance(layer.spec, OpaqueLayer):
            yield _opaque(layer.spec)
            continue
        try:
            case = _case(layer, layer.spec, read_layer(headers, layer), facts, tokens, dtype, random)
            yield _check(headers, layer, case, policy or FusionPolicy(), device, load)
        except (CheckpointError, ValueError) as error:
            yield LayerCheck(layer.name, problems=(str(error),))


def passes(checks: Sequence[LayerCheck]) -> bool:
    """No layer fails, and something was computed at all."""
    return all(check.ok for check in checks) and any(not check.skipped for check in checks)


def _opaque(layer: OpaqueLayer) -> LayerCheck:
    """A format that is not known here is skipped; tensors that are missing or do not fit are a failure."""
    foreign = any(reason.startswith(("not readable", "config.json")) for reason in layer.reasons)
    broken = tuple(r for r in layer.reasons if r.startswith(("missing", "wrong shape")) or not foreign)
    return LayerCheck(layer.name, how=layer.reasons[0], problems=broken, skipped=not broken)


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
    device: torch.device | str,
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
    )
    problems = [problem for run in runs for problem in run.problems]
    for what, found, limit in (
        ("folded", check.folded, tolerance),
        ("unfolded", check.unfolded, tolerance),
        ("the shared expert alone", check.shared, tolerance),
        ("folded against unfolded", None if plan.requantize else check.agreement, AGREEMENT),
    ):
        if found is not None and not found <= limit:
            problems.append(f"{what}: relative error {found:.2e}, allowed {limit:.1e}")
    return replace(check, problems=tuple(problems))


def _run(moe: FoldedMoE, case: _Case, device: torch.device | str) -> _Run:
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


def _case(
    layer: MoELayer,
    spec: LayerSpec,
    truth: LayerTensors,
    facts: ModelFacts,
    tokens: int,
    dtype: torch.dtype,
    random: torch.Generator,
) -> _Case:
    x = torch.randn(tokens, spec.hidden, generator=random).to(dtype)
    router = truth.router
    if "weight" not in router:
        raise CheckpointError(f"{layer.name}: missing: gate.weight, without which no token finds its experts")
    ids, weights = routes(x, router, spec.top_k, facts, random)
    gate = router.get("shared_gate")
    s = None if gate is None else torch.sigmoid(x.float() @ gate.float().flatten())
    return _Case(spec, truth, x, ids, weights, s)


def routes(
    x: Tensor, router: Mapping[str, Tensor], k: int, facts: ModelFacts, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Ids and weights ``[M, K]`` that a layer's own router gives to ``x``; a hash layer gets random token ids."""
    logits = x.float() @ router["weight"].float().T
    bias = router.get("bias")
    scoring: Any = facts.scoring or ("softmax" if bias is None else "sigmoid")
    common: dict[str, Any] = {
        "scoring": scoring, "renormalize": facts.renormalize, "routed_scale": facts.routed_scale
    }  # fmt: skip
    table = router.get("table")
    if table is not None:
        tokens = torch.randint(0, table.shape[0], (x.shape[0],), generator=random)
        return routing.hashed(logits, tokens, table, **common)
    groups = facts.groups if logits.shape[1] % facts.groups == 0 else 1
    return routing.top_k(logits, k, bias=bias, groups=groups, top_groups=min(facts.top_groups, groups), **common)
