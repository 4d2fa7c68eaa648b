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

    Weights = tuple[ExpertWeights, ExpertWeights]
    Arm = Callable[[Batch, int], Tensor]
OWN_ARMS = {"folded": "native", "dual-stream": "dual", "serial": "off"}
"""Our arms and the policy behind each."""

_WEIGHT_SETS = 2
"""On a GPU calls alternate between sets, or the shared expert of one would stay in the L2 cache."""

_CHECKED_TOKENS = 8
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
    assert shape.spec.shared is not None
    sets = [
        (
            shapes.random_weights(shape.spec.routed, shape.spec.hidden, generator),
            shapes.random_weights(shape.spec.shared, shape.spec.hidden, generator),
        )
        for _ in range(_WEIGHT_SETS if device.type == "cuda" else 1)
    ]
    result = LayerResult(
        request.shape,
        shape.what,
        f"H {shape.spec.hidden}, routed {shape.spec.routed}, shared {shape.spec.shared}, top-{shape.spec.top_k}",
        ceilings.measure(device, fp8=shape.spec.activations != "bf16"),
        versions.collect(device),
    )
    arms = _arms(request, shape.spec, sets, result)
    for tokens in request.tokens:
        if progress:
            progress(f"{request.shape}: {tokens} tokens")
        batches = [shapes.random_batch(shape.spec, tokens, generator) for _ in range(request.inputs)]
        result.rows.extend(_rows(arms, batches, shape.spec, sets[0], request, device, result.ceilings))
    return result


def _arms(request: Request, spec: LayerSpec, sets: list[Weights], result: LayerResult) -> dict[str, Arm]:
    arms: dict[str, Arm] = {}
    device = sets[0][0].device
    for name in request.arms:
        if name == "stock":
            try:
                for stock_name, run_block in stock.transformers_arms(spec, *sets[0]).items():
                    arms[stock_name] = _each([run_block] * len(sets))
            except (ImportError, ValueError) as error:
                result.refused["transformers"] = str(error)
            continue
        if name not in OWN_ARMS:
            raise ValueError(f"no arm {name!r}; there are: {', '.join((*OWN_ARMS, 'stock'))}")
        if name == "dual-stream" and device.type == "cpu":
            result.refused[name] = "a CPU has no second stream"
            continue
        policy = FusionPolicy(OWN_ARMS[name], backend=request.backend, activations=request.activations)  # type: ignore[arg-type]
        layers = [
            FoldedMoE(*weights, activation=spec.activation, policy=policy, top_k=spec.top_k, name=f"set {number}")
            for number, weights in enumerate(sets)
        ]
        arms[f"{layers[0].plan.backend} {name}"] = _each([_own(layer) for layer in layers])
    return arms


def _own(layer: FoldedMoE) -> Callable[[Batch], Tensor]:
    def call(batch: Batch) -> Tensor:
        y: Tensor = layer(batch.x, batch.topk_ids, batch.topk_weights)
        return y

    return call


def _each(calls: list[Callable[[Batch], Tensor]]) -> Arm:
    """The turn-th call goes to the turn-th set of weights, round and round."""
    return lambda batch, turn: calls[turn % len(calls)](batch)


def _rows(
    arms: dict[str, Arm],
    batches: list[Batch],
    spec: LayerSpec,
    weights: Weights,
    request: Request,
    device: torch.device,
    limits: ceilings.Ceilings,
) -> list[Row]:
    tokens = batches[0].x.shape[0]

    def step(arm: Arm) -> timing.Step:
        return lambda turn: arm(batches[turn], turn)

    with torch.inference_mode():
        errors = {name: _error(arm, batches[0], spec, weights, request) for name, arm in arms.items()}
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


def _error(arm: Arm, batch: Batch, spec: LayerSpec, weights: Weights, request: Request) -> float | None:
    """Checked before it is timed. Rows are independent, so that a few tell of all."""
    y = arm(batch, 0)
    rows = slice(0, min(len(batch.x), _CHECKED_TOKENS))
    touched = int(batch.topk_ids[rows].unique().numel()) + 1
    if touched * spec.routed.width * spec.hidden * 24 > _CHECKED_BYTES and batch.x.device.type == "cpu":
        return None
    precision = spec.activations if request.activations == "checkpoint" else request.activations
    truth = reference.reference_moe(
        batch.x[rows],
        batch.topk_ids[rows],
        batch.topk_weights[rows],
        *weights,
        activation=spec.activation,
        activations=precision,  # type: ignore[arg-type]
    )
    return reference.relative_error(y[rows], truth)
