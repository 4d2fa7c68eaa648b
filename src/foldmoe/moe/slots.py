"""Expert-parallel slots: one extra slot per rank that holds the shared expert.

With ``n`` routed experts on ``R`` ranks, rank r's slots are its routed experts followed by one shared slot. Where n
divides evenly (L = n / R), that is ``slot(e) = e + e // L`` and ``shared(r) = r * (L + 1) + L``; uneven ranges shift
by the rank that holds the expert all the same. -1 stays -1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.moe.spec import Placement

if TYPE_CHECKING:
    from collections.abc import Sequence


@cache
def ends(counts: tuple[int, ...], device: torch.device) -> Tensor:
    """``[R]`` int64: one past each rank's last id. Kept, so that a CUDA graph finds it on the device."""
    return torch.tensor(counts, device=device).cumsum(0)


def owners(ids: Tensor, counts: tuple[int, ...]) -> Tensor:
    """The rank that holds each id, where rank r holds the next ``counts[r]`` ids.

    Args:
        ids: ``[...]`` int32 or int64: physical experts, or slots (counts one larger then).
        counts: ids of each rank.

    Returns:
        ``[...]`` int64; ``len(counts)`` for -1 and everything else that no rank holds.
    """
    rank = torch.bucketize(ids.contiguous(), ends(counts, ids.device), right=True)
    return torch.where(ids < 0, len(counts), rank)


def local_ids(ids: Tensor, counts: tuple[int, ...], rank: int) -> Tensor:
    """Ids over all ranks to ``rank``'s own, 0 .. counts[rank] - 1; other ranks' become -1. Same shape and dtype."""
    local = ids - sum(counts[:rank])
    return torch.where((local >= 0) & (local < counts[rank]), local, -1)


@dataclass(frozen=True)
class SlotMap:
    """Slots of ``experts_per_rank`` physical experts and one shared slot on every rank.

    Args:
        experts_per_rank: routed experts that each rank holds, redundant (EPLB) ones included.

    Raises:
        ValueError: for a negative count or no rank at all.
    """

    experts_per_rank: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.experts_per_rank or min(self.experts_per_rank) < 0:
            raise ValueError(f"experts per rank must be counts >= 0 of at least one rank: {self.experts_per_rank}")

    @classmethod
    def even(cls, experts: int, ranks: int) -> SlotMap:
        """``experts`` in contiguous ranges over ``ranks``; the first ranks hold one more if they do not divide."""
        return cls(tuple(len(Placement(ranks, rank).experts(experts)) for rank in range(ranks)))

    @property
    def num_experts(self) -> int:
        return sum(self.experts_per_rank)

    @property
    def num_slots(self) -> int:
        return self.num_experts + len(self.experts_per_rank)

    def shared_slot(self, rank: int) -> int:
        """The slot of ``rank``'s copy of the shared expert.

        Raises:
            ValueError: for a rank that does not exist.
        """
        if not 0 <= rank < len(self.experts_per_rank):
            raise ValueError(f"rank {rank} of {len(self.experts_per_rank)} ranks; the first is rank 0")
        return sum(self.experts_per_rank[: rank + 1]) + rank

    @property
    def slots_per_rank(self) -> tuple[int, ...]:
        return tuple(count + 1 for count in self.experts_per_rank)

    def to_slots(self, ids: Tensor) -> Tensor:
        """Physical expert ids to slots, same shape and dtype; -1 stays.

        Raises:
            ValueError: on a CPU, for ids outside -1 .. num_experts - 1: a list that already carries slots is refused.
                On a GPU, where looking would wait for the device, such an id becomes -1.
        """
        self._check(ids, self.num_experts, "expert ids")
        rank = torch.bucketize(ids.contiguous(), ends(self.experts_per_rank, ids.device), right=True)
        known = (ids >= 0) & (ids < self.num_experts)
        return torch.where(known, ids + rank.to(ids.dtype), -1)

    def from_slots(self, slots: Tensor) -> Tensor:
        """Inverse of :meth:`to_slots`; a shared slot and -1 both become -1."""
        self._check(slots, self.num_slots, "slots")
        shared = torch.tensor([self.shared_slot(r) for r in range(len(self.experts_per_rank))], device=slots.device)
        rank = torch.bucketize(slots.contiguous(), shared, right=False)
        is_shared = torch.isin(slots, shared.to(slots.dtype))
        return torch.where((slots < 0) | is_shared, torch.full_like(slots, -1), slots - rank.to(slots.dtype))

    @staticmethod
    def _check(ids: Tensor, limit: int, what: str) -> None:
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{what} must be int32 or int64, found {ids.dtype}")
        if ids.device.type == "cpu" and ids.numel() and (int(ids.min()) < -1 or int(ids.max()) >= limit):
            raise ValueError(f"{what} must lie in -1 .. {limit - 1}, found {int(ids.min())} .. {int(ids.max())}")


def append_shared_slot(
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    experts_per_rank: int | Sequence[int],
    rank: int,
    top_k: int,
    ranks: int | None = None,
    shared_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Remap routed ids to slots and give every token a route to its own rank's shared slot.

    Args:
        topk_ids: ``[M, K]`` int32 or int64 physical routed ids, -1 for none.
        topk_weights: ``[M, K]`` float32, ``routed_scaling_factor`` already in them.
        experts_per_rank: L, the same on every rank, or one count a rank.
        rank: this rank.
        top_k: the layer's K; a list of another width (one that already carries a slot, say) is refused.
        ranks: how many there are, where ``experts_per_rank`` is one number; None: as many as the ids reach, which have
            to be looked at for it. Given, nothing waits for a GPU, and a CUDA graph can capture the call.
        shared_weights: ``[M]`` weights of the shared expert; 1 where None.

    Returns:
        ``(ids [M, K+1], weights [M, K+1])``, the shared route last.

    Raises:
        ValueError: wrong shapes, or a list that is not ``top_k`` wide; on a CPU, ids out of range (see
            :meth:`SlotMap.to_slots`).
        TypeError: ids that are no integers.
    """
    if topk_ids.dim() != 2 or topk_ids.shape != topk_weights.shape:
        raise ValueError(f"ids {list(topk_ids.shape)} and weights {list(topk_weights.shape)} must both be [M, K]")
    if topk_ids.shape[1] != top_k:
        raise ValueError(
            f"the route list is {topk_ids.shape[1]} wide but the router chooses {top_k}: "
            "a shared slot is appended here and never comes from the router"
        )
    if isinstance(experts_per_rank, int):
        if ranks is None:
            highest = int(topk_ids.max()) if topk_ids.numel() else 0
            ranks = max(rank, highest // max(experts_per_rank, 1)) + 1
        slots = SlotMap((experts_per_rank,) * ranks)
    else:
        slots = SlotMap(tuple(experts_per_rank))
    tokens = topk_ids.shape[0]
    if shared_weights is not None and shared_weights.numel() != tokens:
        raise ValueError(f"shared_weights must be [{tokens}], found {list(shared_weights.shape)}")
    shared_ids = topk_ids.new_full((tokens, 1), slots.shared_slot(rank))
    ones = topk_weights.new_ones(tokens) if shared_weights is None else shared_weights.to(topk_weights)
    return (
        torch.cat((slots.to_slots(topk_ids), shared_ids), dim=1),
        torch.cat((topk_weights, ones.reshape(-1, 1)), dim=1),
    )


def check_replicas(physical: Tensor) -> None:
    """Every logical expert has a replica, and no physical expert is two of them.

    Args:
        physical: ``[n, max_replicas]``, -1 where an expert has fewer.

    Raises:
        ValueError: naming the expert.
    """
    held = physical >= 0
    if physical.dim() != 2 or not bool(held.any(dim=1).all()):
        missing = held.any(dim=-1).logical_not().nonzero().flatten().tolist()
        raise ValueError(f"physical must be [n, replicas] with a replica of every expert; without one: {missing}")
    used, times = physical[held].unique(return_counts=True)
    if bool((times > 1).any()):
        raise ValueError(f"physical experts {used[times > 1].tolist()} stand for more than one logical expert")
    if bool((held[:, 1:] & ~held[:, :-1]).any()):
        raise ValueError("physical: an expert's replicas come first in its row, then -1")


def to_physical(logical_ids: Tensor, physical: Tensor, *, checked: bool = False) -> Tensor:
    """Logical to physical experts under redundant placement (EPLB), before any slot map.

    Args:
        logical_ids: ``[M, K]``, -1 for none.
        physical: ``[n, max_replicas]`` physical ids of each logical expert, -1 where it has fewer replicas.
        checked: :func:`check_replicas` passed: skip the look at the result, for which a GPU would have to be waited.

    Returns:
        Physical ids ``[M, K]``; replicas are taken in turn by token row, so that the choice is deterministic.

    Raises:
        ValueError: if an expert that a token chose has no replica: its route would vanish.
    """
    counts = (physical >= 0).sum(dim=-1)
    safe = logical_ids.clamp_min(0).to(torch.int64)
    row = torch.arange(logical_ids.shape[0], device=logical_ids.device)[:, None]
    chosen = physical[safe, row % counts[safe].clamp_min(1)].to(logical_ids.dtype)
    lost = (logical_ids >= 0) & (chosen < 0)
    if not checked and bool(lost.any()):
        raise ValueError(f"logical expert {int(logical_ids[lost][0])} is routed to but has no physical replica")
    return torch.where(logical_ids < 0, logical_ids, chosen)


def expert_load(logical_ids: Tensor, num_experts: int) -> Tensor:
    """Routes per logical routed expert, ``[num_experts]`` int64; -1 and shared slots never count."""
    flat = logical_ids.flatten().to(torch.int64)
    known = torch.where((flat >= 0) & (flat < num_experts), flat, num_experts)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)  # no shape depends on the ids
    return counts.scatter_add_(0, known, torch.ones_like(known))[:num_experts]
