"""The kernel variants that plans need: found by walking the host code over meta tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from foldmoe.backends import Call, get
from foldmoe.backends.base import run_planned
from foldmoe.planner.decide import slotted
from foldmoe.runtime import kernel_cache
from foldmoe.runtime.kernels import Compiler, compiling
from foldmoe.runtime.offline import standing_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from foldmoe.backends import PackedLayer
    from foldmoe.planner import LayerPlan
    from foldmoe.planner.devices import Device

_EVERY = 256
_STEP = 16


def sizes(most: int) -> tuple[int, ...]:
    """Batch sizes that between them need every variant of batches of 1 .. ``most`` tokens.

    All small ones; then every 16th and the largest, because no choice of tiles holds for fewer than 16 sizes there, and
    the kernels keep Triton from looking at numbers of tokens, of which it would compile multiples of 16 by themselves.
    """
    return tuple(sorted({*range(1, min(_EVERY, most + 1)), *range(_EVERY, most + 1, _STEP), most}))


@dataclass(frozen=True)
class Calls:
    """The calls that kernels are compiled for.

    Args:
        tokens: batch sizes.
        dtype: of x. ids: dtypes of topk_ids.
        on_device: arguments of ``forward`` that come as device tensors: "num_valid_tokens", "shared_rows".
        shared_weights: s is given; None: where the plan says that the shared expert has a gate.

    Raises:
        ValueError: a size below 1, or an argument that takes no device tensor.
    """

    tokens: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    ids: tuple[torch.dtype, ...] = (torch.int32, torch.int64)
    on_device: tuple[str, ...] = ()
    shared_weights: bool | None = None

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError(f"batch sizes must be 1 or more, found {self.tokens}")
        if unknown := set(self.on_device) - {"num_valid_tokens", "shared_rows"}:
            raise ValueError(f"on_device knows num_valid_tokens and shared_rows, found {', '.join(sorted(unknown))}")

    def gated(self, plan: LayerPlan) -> bool:
        """Whether calls of this plan's layer weigh the shared expert."""
        return plan.spec.shared_gate if self.shared_weights is None else self.shared_weights

    def bounds(self, tokens: int, device: torch.device | str) -> dict[str, Any]:
        """The arguments that come as device tensors."""
        values = {"num_valid_tokens": [tokens], "shared_rows": [0, tokens]}
        return {name: torch.tensor(values[name], dtype=torch.int32, device=device) for name in self.on_device}


def walk(
    plans: Sequence[LayerPlan],
    calls: Calls,
    device: Device,
    wanted: Callable[[str, int], bool],
    done: Callable[[Any], None],
) -> list[str]:
    """Find all variants; compile those that ``wanted(kernel name, how many of that kernel came before)`` asks for.

    Args:
        plans: one rank's layers; those that a backend without kernels runs need nothing.
        done: gets each compiled kernel.

    Returns:
        The kernel's name of every variant, in an order that is the same in every process.

    Raises:
        ValueError: kernels cannot be compiled for ``device``, or a layer whose top-k nothing tells.
    """
    found: list[str] = []

    def asked(name: str) -> bool:
        found.append(name)
        return wanted(name, found.count(name) - 1)

    compiler = Compiler(asked, done)
    with torch.no_grad():
        for plan, layer in _outlines(plans, device):
            assert device.arch is not None
            with standing_in(device.kind, device.arch), kernel_cache.used(), compiling(compiler):
                for tokens in calls.tokens:
                    for ids in calls.ids:
                        run_planned(layer, plan, _call(plan, layer, calls, tokens, ids), tokens)
    return found


def _outlines(plans: Sequence[LayerPlan], device: Device) -> Iterator[tuple[LayerPlan, PackedLayer]]:
    """One layer of each kind."""
    met: set[Any] = set()
    for plan in plans:
        spec = replace(plan.spec, name="", draft=False, notes=())
        kind = (spec, plan.strategy, plan.arm, plan.backend, plan.activations, plan.fold_rows, plan.placement)
        if plan.arm == "stock" or kind in met:
            continue
        met.add(kind)
        local = plan.spec.local(plan.placement)
        if plan.strategy == "slot":
            local = slotted(local)
        layer = get(plan.backend).outline(local, plan.activations, device)
        if layer is None:
            continue
        if plan.spec.top_k < 0:
            raise ValueError(f"{plan.layer}: nothing tells how many experts a token takes (top-k)")
        layer.route_share = len(plan.placement.experts(plan.spec.routed.count)) / max(1, plan.spec.routed.count)
        yield plan, layer


def _call(plan: LayerPlan, layer: PackedLayer, calls: Calls, tokens: int, ids: torch.dtype) -> Call:
    """As :meth:`foldmoe.FoldedMoE.run` hands it to the backend."""
    shape, count = (tokens, plan.spec.top_k), plan.spec.routed.count
    call = Call(
        torch.empty(tokens, plan.spec.hidden, dtype=calls.dtype, device="meta"),
        torch.empty(shape, dtype=ids, device="meta"),
        torch.empty(shape, device="meta"),
        torch.empty(tokens, device="meta") if calls.gated(plan) else None,
        **calls.bounds(tokens, "meta"),
    )
    return layer.rank_routes(call, plan.placement.experts(count), count, slot=plan.strategy == "slot")
