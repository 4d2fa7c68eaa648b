"""``foldmoe bench layer``: one layer in several arms over the same weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.bench import ceilings, oracle, shapes, stock, timing, versions
from foldmoe.bench.peers import peer_arms
from foldmoe.bench.result import LayerResult, Request, Row
from foldmoe.layer import FoldedMoE
from foldmoe.moe.spec import in_words
from foldmoe.options import distinct, in_range
from foldmoe.planner import FusionPolicy
from foldmoe.planner.devices import torch_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from foldmoe.bench.peers import PeerArms
    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec

    Weights = tuple[ExpertWeights, ExpertWeights]
    Arm = Callable[[Batch, int], Tensor]
OWN_ARMS = {"folded": "native", "dual-stream": "dual", "serial": "off"}
"""Our arms and the policy behind each."""

_WEIGHT_SETS = 2
"""On a GPU calls alternate between sets, or the shared expert of one would stay in the L2 cache."""

_CHECKED_BYTES = 2**30


class StoppedError(RuntimeError):
    """A number of tokens failed or was interrupted.

    Args:
        tokens: at which the run ended.
        result: the rows before it; ``refused`` says why no more.
    """

    def __init__(self, tokens: int, why: str, result: LayerResult):
        super().__init__(f"stopped at {tokens:,} tokens: {why}")
        self.result = result


def run(request: Request, progress: Callable[[str], None] | None = None) -> LayerResult:
    """Time the arms.

    Raises:
        StoppedError: a number of tokens failed, as for want of memory, or was interrupted; holds the rows before.
        ValueError: an unknown shape or arm, an arm twice, no rows, rounds or inputs, a device that is not here, or a
            layer that the asked backend does not run.
    """
    if request.shape not in shapes.SHAPES:
        raise ValueError(f"no shape {request.shape!r}; there are: {', '.join(shapes.SHAPES)}")
    in_range(1, tokens=request.tokens, rounds=request.rounds, inputs=request.inputs)
    distinct("arms", request.arms)
    distinct("peers", request.peers)
    device = torch_device(request.device)
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
        request,
        request.shape,
        shape.what,
        in_words(shape.spec),
        ceilings.measure(device, fp8=shape.spec.activations != "bf16"),
        versions.collect(device),
        command=request.command,
    )
    arms, held = _arms(request, shape.spec, sets, result)
    peers = peer_arms(request.peers, request.arms, shape.spec, sets, request.tokens)
    try:
        for tokens in request.tokens:
            if progress:
                progress(f"{request.shape}: {tokens} tokens")
            batches = [shapes.random_batch(shape.spec, tokens, generator) for _ in range(request.inputs)]
            result.rows.extend(_rows(arms, peers, batches, shape.spec, sets[0], request, device, result.ceilings))
    except (Exception, KeyboardInterrupt) as error:  # whatever it is, an hour of rows must not be lost with it
        why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {_first_line(error)}"
        result.refused[f"{tokens:,} tokens"] = why
        raise StoppedError(tokens, why, result.bounded()) from error
    finally:
        result.refused.update(peers.refused)
        result.memory.update({name: layer.memory() for name, layer in held.items()})
    return result.bounded()


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _arms(
    request: Request, spec: LayerSpec, sets: list[Weights], result: LayerResult
) -> tuple[dict[str, Arm], dict[str, FoldedMoE]]:
    """What to call, and one layer of each arm that is ours."""
    arms: dict[str, Arm] = {}
    held: dict[str, FoldedMoE] = {}
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
        held[f"{layers[0].plan.backend} {name}"] = layers[0]
    return arms, held


def _own(layer: FoldedMoE) -> Callable[[Batch], Tensor]:
    def call(batch: Batch) -> Tensor:
        y: Tensor = layer(batch.x, batch.topk_ids, batch.topk_weights)
        return y

    return call


def _each(calls: list[Callable[[Batch], Tensor]]) -> Arm:
    """The turn-th call goes to the turn-th set of weights, round and round."""
    return lambda batch, turn: calls[turn % len(calls)](batch)


def _rows(
    own: dict[str, Arm],
    peers: PeerArms,
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
        errors = {name: _error(arm, batches[0], spec, weights, request) for name, arm in own.items()}
        checked = {name: peers.error(name, batches[0], spec, weights) for name in peers.calls}
        right = {name: error for name, error in checked.items() if error is not None}
        arms = own | {name: _each(peers.calls[name]) for name in right}
        errors.update(right)
        times = timing.interleaved(
            {name: step(arm) for name, arm in arms.items()}, inputs=len(batches), rounds=request.rounds, device=device
        )
    nbytes = sum(shapes.floor_bytes(spec, b.topk_ids) for b in batches) // len(batches)
    operations = shapes.flops(spec, tokens)
    others = [t.median for name, t in times.items() if name in right or name.startswith("transformers")]
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
    """Relative; None where the layer is too large to check here."""
    y = arm(batch, 0)
    touched = int(batch.topk_ids[: oracle.CHECKED_TOKENS].unique().numel()) + 1
    if touched * spec.routed.width * spec.hidden * 24 > _CHECKED_BYTES and batch.x.device.type == "cpu":
        return None
    precision = spec.activations if request.activations == "checkpoint" else request.activations
    return oracle.error(y, batch, spec, weights, precision)  # type: ignore[arg-type]
