"""What all ranks of one layer agree on before any token travels, and the buffers that follow from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from foldmoe.moe.slots import SlotMap
from foldmoe.moe.spec import Placement
from foldmoe.parallel.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from foldmoe.moe.spec import ActivationPrecision
    from foldmoe.planner import LayerPlan

Dispatch = Literal["all_gather", "all_to_all", "symmetric"]
Order = Literal["rank", "route"]

DISPATCHES: tuple[Dispatch, ...] = ("all_gather", "all_to_all", "symmetric")
ORDERS: tuple[Order, ...] = ("rank", "route")


@dataclass(frozen=True)
class Scheme:
    """How one layer's tokens travel; equal on every rank.

    Args:
        experts_per_rank: physical routed experts of each rank.
        hidden, top_k: H and K.
        slot: the shared expert is one more local expert (strategy "slot"); else the local layer folds it natively.
        shared: there is a shared expert.
        activations: the layer's precision; fp8 activations travel as E4M3.
        dtype: of x and y.
        result_dtype: of results on their way back.
        dispatch: "all_gather" gives every rank all tokens; "all_to_all" sends a token to the ranks that its experts
            are on, once each; "symmetric" writes it into their memory instead.
        order: how results add up, in float32. "rank": each rank returns one sum a token, weights applied there, added
            in the order of ranks. "route": each route returns alone, its weight is applied by the token's own rank in
            the order of k, the shared part last: the same bits for any number of ranks where the backend is
            deterministic.
        capacity: tokens that one rank may bring to one exchange.

    Raises:
        ValueError: an unknown choice, or "route" without "all_to_all": the others have one result a token and rank.
    """

    experts_per_rank: tuple[int, ...]
    hidden: int
    top_k: int
    slot: bool
    shared: bool
    activations: ActivationPrecision
    dtype: torch.dtype
    result_dtype: torch.dtype
    dispatch: Dispatch
    order: Order
    capacity: int

    def __post_init__(self) -> None:
        for name, found, allowed in (
            ("strategy", self.dispatch, DISPATCHES),
            ("order", self.order, ORDERS),
        ):
            if found not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; found {found!r}")
        if self.order == "route" and self.dispatch != "all_to_all":
            raise ValueError(
                f"order 'route' needs strategy 'all_to_all': {self.dispatch!r} has one result a token and rank"
            )
        if self.capacity < 1:
            raise ValueError(f"max_tokens_per_rank must be at least 1, found {self.capacity}")
        if self.top_k < 0:
            raise ValueError("the layer does not say how many experts a token chooses; give FoldedMoE its top_k")

    @classmethod
    def of(
        cls,
        plan: LayerPlan,
        capacity: int,
        *,
        dispatch: Dispatch = "all_gather",
        order: Order = "rank",
        dtype: torch.dtype = torch.bfloat16,
        result_dtype: torch.dtype | None = None,
    ) -> Scheme:
        """The scheme of a planned layer.

        Raises:
            ValueError: see the class.
        """
        spec, place = plan.spec, plan.placement
        held = tuple(len(Placement(place.ep_size, rank).experts(spec.routed.count)) for rank in range(place.ep_size))
        shared = spec.shared is not None
        slot = plan.strategy == "slot" and shared
        return cls(
            held, spec.hidden, spec.top_k, slot, shared, plan.activations, dtype, result_dtype or dtype, dispatch,
            order, capacity,
        )  # fmt: skip

    @property
    def ranks(self) -> int:
        return len(self.experts_per_rank)

    @property
    def slots(self) -> SlotMap:
        return SlotMap(self.experts_per_rank)

    @property
    def ids_per_rank(self) -> tuple[int, ...]:
        """Ids that each rank owns as they travel: physical experts, or slots."""
        return self.slots.slots_per_rank if self.slot else self.experts_per_rank

    @property
    def wire(self) -> Wire:
        return Wire(self.hidden, self.top_k, self.activations, self.dtype)

    @property
    def local_dtype(self) -> torch.dtype:
        """Of x as the local layer gets it, and of what that returns.

        It holds x as it travelled, and results: bf16 and fp16 have no common dtype but float32, and fp16 has too few
        exponents for E4M3 times its scale, which bf16 holds exactly.
        """
        if self.wire.group:
            return torch.float32 if torch.float16 in (self.dtype, self.result_dtype) else self.result_dtype
        return torch.promote_types(self.dtype, self.result_dtype)

    @property
    def local_top_k(self) -> int:
        """Routes a token of the local launch: K, and the shared slot's."""
        return self.top_k + self.slot

    @property
    def result_bytes(self) -> int:
        """Of one result on its way back."""
        return self.hidden * self.result_dtype.itemsize

    @property
    def mailbox_bytes(self) -> int:
        """Of one exchange at capacity, where ranks write to each other."""
        return self.ranks * self.capacity * max(self.wire.row_bytes, self.result_bytes)

    def local_rows(self, tokens: int) -> int:
        """Most rows of any rank's local launch, where no rank has more than ``tokens`` tokens of its own."""
        held = tokens * self.ranks
        if self.order == "route":  # a row a route; only a rank's own tokens have a shared one
            return held * self.top_k + tokens * self.shared
        return held

    def buffers(self) -> dict[str, int]:
        """Bytes of every buffer of one exchange at capacity and under the worst routing: all tokens to this rank.

        More tokens than ``capacity`` never start an exchange. The sum of a rank's own tokens, ``[T, H]`` float32, comes
        on top.
        """
        tokens, others = self.capacity, self.ranks - 1
        gathers, row, result = self.dispatch == "all_gather", self.wire.row_bytes, self.result_bytes
        copies = min(self.top_k, others)  # of a token, to other ranks
        sent = tokens if gathers else tokens * (1 + copies)  # its own row stays, but is packed all the same
        held = tokens * self.ranks
        rows = self.local_rows(tokens)
        returns = copies if self.order == "rank" or not others else self.top_k
        routes = rows if self.order == "route" else rows * self.local_top_k
        launch = rows * self.hidden * self.local_dtype.itemsize
        local = {
            "local x": launch,
            "local routes": routes * 8,  # int32 and float32
            "local results": rows * result,
        }
        if self.local_dtype != self.result_dtype:
            local["local results, rounded"] = local["local results"]
            local["local results"] = launch
        if self.dispatch == "symmetric":
            return {"mailbox": 2 * self.mailbox_bytes, **local}
        found = {
            "rows sent": sent * row,
            "rows received": held * row if gathers else others * tokens * row,
            **local,
            "results received": held * result if gathers else tokens * returns * result,
        }
        if self.order == "route":
            found["results by route"] = tokens * self.top_k * self.hidden * 4
        return found

    def facts(self) -> dict[str, Any]:
        """For the comparison over ranks, beside the plan's own decision."""
        return {
            "experts_per_rank": list(self.experts_per_rank),
            "dtype": str(self.dtype),
            "result_dtype": str(self.result_dtype),
            "dispatch": self.dispatch,
            "order": self.order,
            "max_tokens_per_rank": self.capacity,
        }


def largest_buffers(
    plans: Iterable[LayerPlan], capacity: int, dispatches: Sequence[Dispatch] = DISPATCHES
) -> dict[Dispatch, int]:
    """Bytes of a rank's exchange buffers by strategy, of the layer that needs most: layers take turns with them.

    Args:
        plans: layers; those of an engine's own, or of an unknown top-k, have no exchange here.
        capacity: tokens that one rank may bring to one exchange.
        dispatches: strategies.

    Raises:
        ValueError: a capacity below 1.
    """
    found: dict[Dispatch, int] = {}
    for plan in plans:
        if plan.spec.top_k < 0 or plan.backend == "stock":
            continue
        for dispatch in dispatches:
            nbytes = sum(Scheme.of(plan, capacity, dispatch=dispatch).buffers().values())
            found[dispatch] = max(found.get(dispatch, 0), nbytes)
    return found
