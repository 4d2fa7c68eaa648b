"""``foldmoe bench layer``: one layer in several arms over the same weights."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foldmoe import reference
from foldmoe.bench import ceilings, shapes, stock, timing, versions
from foldmoe.layer import FoldedMoE
from foldmoe.planner import FusionPolicy

if TYPE_CHECKING:
    from collections.abc import Callable

    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec

OWN_ARMS = {"folded": "native", "dual-stream": "dual", "serial": "off"}
"""Our arms and the policy behind each."""

_CHECKED_TOKENS = 64
_CHECKED_BYTES = 2**30


@dataclass(frozen=True)
class Row:
    """One arm at one number of tokens.

    Args:
        seconds: median of a call; low and high beside it.
        noise: the arm against itself.
        error: relative to the float64 oracle; None where the layer is too large to check here.
        floor: seconds that bytes and operations take at the measured ceilings.
        against: median over the best other arm's that is not ours; None without one.
    """

    arm: str
    tokens: int
    seconds: float
    low: float
    high: float
    noise: float
    error: float | None
    floor: float
    gigabytes_per_second: float
    teraflops: float
    against: float | None = None


@dataclass(frozen=True)
class LayerResult:
    """All rows of one run, and what they were measured on."""

    shape: str
    what: str
    spec: str
    ceilings: ceilings.Ceilings
    versions: dict[str, str]
    rows: list[Row] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Request:
    """What to time.

    Args:
        shape: a key of :data:`foldmoe.bench.shapes.SHAPES`.
        tokens: numbers of rows.
        arms: of :data:`OWN_ARMS`, and "stock" for Transformers' own.
        backend: ours, or "auto".
        rounds: that count.
        inputs: sets of inputs to rotate over.
        activations: as in :class:`foldmoe.FusionPolicy`.
    """

    shape: str
    tokens: tuple[int, ...]
    arms: tuple[str, ...] = ("folded", "dual-stream", "serial", "stock")
    backend: str = "auto"
    rounds: int = 20
    inputs: int = 8
    activations: str = "checkpoint"
    device: str | None = None


def run(request: Request, progress: Callable[[str], None] | None = None) -> LayerResult:
    """Time the arms.

    Raises:
        ValueError: an unknown shape or arm, or a layer that the asked backend does not run.
    """
    if request.shape not in shapes.SHAPES:
        raise ValueError(f"no shape {request.shape!r}; there are: {', '.join(shapes.SHAPES)}")
    device = torch.device(request.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    shape = shapes.SHAPES[request.shape]
    generator = torch.Generator(device).manual_seed(0)
    routed = shapes.random_weights(shape.spec.routed, shape.spec.hidden, generator)
    assert shape.spec.shared is not None
    shared = shapes.random_weights(shape.spec.shared, shape.spec.hidden, generator)
    result = LayerResult(
        request.shape,
        shape.what,
        f"H {shape.spec.hidden}, routed {shape.spec.routed}, shared {shape.spec.shared}, top-{shape.spec.top_k}",
        ceilings.measure(device, fp8=shape.spec.activations != "bf16"),
        versions.collect(device),
    )
    arms = _arms(request, shape.spec, routed, shared, result)
    for tokens in request.tokens:
        if progress:
            progress(f"{request.shape}: {tokens} tokens")
        batches = [shapes.random_batch(shape.spec, tokens, generator) for _ in range(request.inputs)]
        result.rows.extend(_rows(arms, batches, shape.spec, routed, shared, request, device, result.ceilings))
    return result


def _arms(
    request: Request, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, result: LayerResult
) -> dict[str, Callable[[Batch], Tensor]]:
    arms: dict[str, Callable[[Batch], Tensor]] = {}
    for name in request.arms:
        if name == "stock":
            try:
                arms |= stock.transformers_arms(spec, routed, shared)
            except (ImportError, ValueError) as error:
                result.refused["transformers"] = str(error)
            continue
        if name not in OWN_ARMS:
            raise ValueError(f"no arm {name!r}; there are: {', '.join((*OWN_ARMS, 'stock'))}")
        if name == "dual-stream" and routed.device.type == "cpu":
            result.refused[name] = "a CPU has no second stream"
            continue
        policy = FusionPolicy(OWN_ARMS[name], backend=request.backend, activations=request.activations)  # type: ignore[arg-type]
        layer = FoldedMoE(
            routed, shared, activation=spec.activation, policy=policy, top_k=spec.top_k, name=f"bench {request.shape}"
        )
        arms[f"{layer.plan.backend} {name}"] = _own(layer)
    return arms


def _own(layer: FoldedMoE) -> Callable[[Batch], Tensor]:
    def call(batch: Batch) -> Tensor:
        y: Tensor = layer(batch.x, batch.topk_ids, batch.topk_weights)
        return y

    return call


def _rows(
    arms: dict[str, Callable[[Batch], Tensor]],
    batches: list[Batch],
    spec: LayerSpec,
    routed: ExpertWeights,
    shared: ExpertWeights,
    request: Request,
    device: torch.device,
    limits: ceilings.Ceilings,
) -> list[Row]:
    tokens = batches[0].x.shape[0]

    def step(arm: Callable[[Batch], Tensor]) -> timing.Step:
        return lambda turn: arm(batches[turn])

    with torch.inference_mode():
        errors = {name: _error(arm, batches[0], spec, routed, shared, request) for name, arm in arms.items()}
        times = timing.interleaved(
            {name: step(arm) for name, arm in arms.items()}, inputs=len(batches), rounds=request.rounds, device=device
        )
    nbytes = sum(shapes.floor_bytes(spec, b.topk_ids) for b in batches) // len(batches)
    operations = shapes.flops(spec, tokens)
    others = [t.median for name, t in times.items() if name.startswith("transformers")]
    return [
        Row(
            name,
            tokens,
            t.median,
            t.low,
            t.high,
            t.noise,
            errors[name],
            limits.floor_seconds(nbytes, operations),
            nbytes / t.median / 1e9,
            operations / t.median / 1e12,
            t.median / min(others) if others else None,
        )
        for name, t in times.items()
    ]


def _error(
    arm: Callable[[Batch], Tensor],
    batch: Batch,
    spec: LayerSpec,
    routed: ExpertWeights,
    shared: ExpertWeights,
    request: Request,
) -> float | None:
    """Checked before it is timed. Rows are independent, so that a few tell of all."""
    y = arm(batch)
    rows = slice(0, min(len(batch.x), _CHECKED_TOKENS))
    touched = int(batch.topk_ids[rows].unique().numel()) + 1
    if touched * spec.routed.width * spec.hidden * 24 > _CHECKED_BYTES and batch.x.device.type == "cpu":
        return None
    precision = spec.activations if request.activations == "checkpoint" else request.activations
    truth = reference.reference_moe(
        batch.x[rows],
        batch.topk_ids[rows],
        batch.topk_weights[rows],
        routed,
        shared,
        activation=spec.activation,
        activations=precision,  # type: ignore[arg-type]
    )
    return reference.relative_error(y[rows], truth)
