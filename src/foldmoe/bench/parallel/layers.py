"""The layers that ``foldmoe bench parallel`` times: one rank's part, of random weights."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import torch

from foldmoe.bench import shapes
from foldmoe.layer import FoldedMoE
from foldmoe.moe import Placement
from foldmoe.planner import FusionPolicy, plan_layer
from foldmoe.planner.devices import resolve
from foldmoe.warming import Calls, compile_ahead

if TYPE_CHECKING:
    from foldmoe.bench.parallel.result import ParallelRequest
    from foldmoe.moe import LayerSpec
    from foldmoe.planner.devices import Device

_FOLD = {("native", "folded"): "native", ("native", "dual-stream"): "dual", ("slot", "folded"): "slot"}


def whole(request: ParallelRequest, ranks: int) -> LayerSpec:
    """The layer over all ranks."""
    spec = shapes.SHAPES[request.shape].spec
    count = spec.routed.count if request.shape in shapes.WHOLE else spec.routed.count * ranks
    return replace(spec, routed=replace(spec.routed, count=count))


def folds(request: ParallelRequest) -> list[tuple[str, str]]:
    """Scheme and arm of every layer; a slot is always folded."""
    return [pair for pair in product(request.schemes, request.arms) if pair in _FOLD]


def policy(request: ParallelRequest, scheme: str, arm: str, device: torch.device | Device) -> FusionPolicy:
    """What to ask the planner for."""
    hopper = resolve(device).is_hopper and shapes.SHAPES[request.shape].spec.activations == "fp8"
    backend = request.backend or ("hopper" if hopper else "auto")
    return FusionPolicy(_FOLD[scheme, arm], backend=backend, allow_requantize=scheme == "slot")  # type: ignore[arg-type]


def layer_of(
    spec: LayerSpec, ranks: int, rank: int, number: int, asked: FusionPolicy, device: torch.device
) -> FoldedMoE:
    """One rank's layer of random weights: routed experts of its own, and the shared one that all ranks hold.

    Args:
        number: another one is another set of weights.
    """
    own, common = (torch.Generator(device).manual_seed(seed) for seed in (100 * number + rank, number))
    place = Placement(ep_size=ranks, ep_rank=rank)
    local = spec.local(place)
    assert local.shared is not None
    routed, shared = (
        shapes.random_weights(part, local.hidden, dice) for part, dice in ((local.routed, own), (local.shared, common))
    )
    return FoldedMoE(
        routed, shared, activation=spec.activation, policy=asked, placement=place, num_experts=spec.routed.count,
        top_k=spec.top_k, name="bench",
    )  # fmt: skip


def compile_kernels(request: ParallelRequest, ranks: int, device: torch.device) -> None:
    """The local launches' kernels, in parallel: one after the other they take minutes.

    What does not compile here will not compile where it is needed, and is reported there.
    """
    plans = [
        plan_layer(whole(request, ranks), policy(request, scheme, arm, device), device, Placement(ranks, 0))
        for scheme, arm in folds(request)
    ]
    calls = Calls(tuple(sorted({ranks * tokens for tokens in request.tokens})), ids=(torch.int32,))
    try:
        report = compile_ahead(plans, calls, resolve(device))
    except (OSError, RuntimeError, ValueError) as error:
        print(f"kernels are compiled as they are needed: {error}", file=sys.stderr, flush=True)
        return
    print(f"{len(report.compiled)} kernels compiled in {report.seconds:.1f} s", file=sys.stderr, flush=True)
