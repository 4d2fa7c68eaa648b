"""``warmup``: each layer runs once at every size, so that nothing is compiled or loaded when it counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from foldmoe.layer import FoldedMoE
from foldmoe.planner.devices import resolve
from foldmoe.warming.processes import compile_ahead
from foldmoe.warming.variants import Calls

if TYPE_CHECKING:
    from collections.abc import Iterable


@runtime_checkable
class Spread(Protocol):
    """A layer over several ranks: :class:`foldmoe.parallel.ExpertParallelMoE`."""

    @property
    def local_layers(self) -> list[FoldedMoE]:
        """Its layers here, which run as parts of it."""

    def warm(self, tokens: int, ids: torch.dtype, *, gated: bool) -> None:
        """One call with as many tokens on every rank."""


@torch.no_grad()
def warmup(
    layer_or_model: torch.nn.Module,
    tokens: Iterable[int],
    *,
    dtype: torch.dtype = torch.bfloat16,
    ids: Iterable[torch.dtype] = (torch.int32, torch.int64),
    on_device: Iterable[str] = (),
    shared_weights: bool | None = None,
    processes: int | None = None,
) -> int:
    """Compile what the folded layers launch for batches of ``tokens``, then run each layer once at every size.

    After that no call at those sizes compiles, and CUDA graphs of them can be captured; a call that would still compile
    during a capture raises.

    Args:
        layer_or_model: a :class:`foldmoe.FoldedMoE`, a :class:`foldmoe.parallel.ExpertParallelMoE`, which all ranks
            warm up at once, or a module that holds some.
        tokens: batch sizes; of an ``ExpertParallelMoE`` those of every rank, of a layer that an engine runs under
            expert parallelism those that reach it.
        dtype: of x. ids: dtypes of topk_ids.
        on_device: arguments that will come as device tensors: "num_valid_tokens", "shared_rows".
        shared_weights: whether calls give ``shared_weights``; None: where the layer's plan says that it has a gate.
        processes: compile in at most so many processes; one a CPU if None.

    Returns:
        Calls run.

    Raises:
        ValueError: no folded layer, a size below 1, an unknown name in ``on_device``, or a layer whose top-k is not
            known (``FoldedMoE(..., top_k=...)``).
        RuntimeError: a kernel that does not compile.
    """
    layers = [module for module in layer_or_model.modules() if isinstance(module, FoldedMoE)]
    spread = [module for module in layer_or_model.modules() if isinstance(module, Spread)]
    inside = {id(layer) for module in spread for layer in module.local_layers}
    if not layers:
        raise ValueError(f"no FoldedMoE in {type(layer_or_model).__name__}: fold the model first")
    calls = Calls(tuple(tokens), dtype, tuple(ids), tuple(on_device), shared_weights)
    for layer in layers:
        if layer.top_k < 0:
            raise ValueError(f"{layer.plan.layer}: top-k is not known; build it with FoldedMoE(..., top_k=K)")
    gpus = {layer.device for layer in layers if layer.device.type == "cuda"}
    for gpu in gpus:
        plans = [layer.plan for layer in layers if layer.device == gpu and id(layer) not in inside]
        if plans:
            compile_ahead(plans, calls, resolve(gpu), processes=processes)
    alone = [layer for layer in layers if id(layer) not in inside]
    for layer in alone:
        for size in calls.tokens:
            for kind in calls.ids:
                _run(layer, calls, size, kind)
    for module in spread:
        for size in calls.tokens:
            for kind in calls.ids:
                module.warm(size, kind, gated=calls.gated(module.local_layers[0].plan))
    for gpu in gpus:
        torch.cuda.synchronize(gpu)
    return (len(alone) + len(spread)) * len(calls.tokens) * len(calls.ids)


def _run(layer: FoldedMoE, calls: Calls, tokens: int, ids: torch.dtype) -> None:
    """One call whose routes are spread over all experts."""
    experts, top_k, device = layer.plan.spec.routed.count, layer.top_k, layer.device
    routes = torch.arange(tokens * top_k, device=device).view(tokens, top_k) % max(1, experts)
    layer(
        torch.zeros(tokens, layer.plan.spec.hidden, dtype=calls.dtype, device=device),
        routes.to(ids),
        torch.full((tokens, top_k), 1 / max(1, top_k), device=device),
        shared_weights=torch.ones(tokens, device=device) if calls.gated(layer.plan) else None,
        **calls.bounds(tokens, device),
    )
