"""One rank's own tokens before they travel, and what its local launch gets after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.backends import Call
from foldmoe.moe.slots import local_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.parallel.scheme import Scheme


@dataclass(frozen=True, eq=False)
class Tokens:
    """What one rank brings to a forward pass.

    Args:
        x: ``[M, H]``.
        topk_ids: ``[M, K]`` int32 or int64 logical experts over all ranks; -1 for none.
        topk_weights: ``[M, K]`` float32.
        shared_weights: ``[M]`` float32; 1 where None.
        num_valid_tokens: rows from here on are padding: they do not travel, do not count, and come out as zero.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    shared_weights: Tensor | None = None
    num_valid_tokens: int | None = None

    @property
    def count(self) -> int:
        """Real tokens."""
        rows = self.x.shape[0]
        return rows if self.num_valid_tokens is None else max(0, min(self.num_valid_tokens, rows))

    def rows(self, start: int, end: int) -> Tokens:
        """A range of rows, all of them real."""
        gate = None if self.shared_weights is None else self.shared_weights[start:end]
        return Tokens(self.x[start:end], self.topk_ids[start:end], self.topk_weights[start:end], gate)

    def problem(self, name: str, scheme: Scheme, experts: int, device: torch.device | None = None) -> Exception | None:
        """Why these arguments do not fit, to be raised once all ranks know; None if they do.

        Args:
            name: the layer's.
            scheme: what was agreed on.
            experts: logical ones. Values of ids are looked at on a CPU alone.
            device: the group's, where all arguments must lie; x's where None.
        """
        x, ids, weights, gate = self.x, self.topk_ids, self.topk_weights, self.shared_weights
        wanted = device or x.device
        found = {"x": x, "topk_ids": ids, "topk_weights": weights, "shared_weights": gate}
        if away := [f"{what} on {t.device}" for what, t in found.items() if t is not None and not _on(t, wanted)]:
            return ValueError(f"{name}: all arguments must lie on {wanted}, found {', '.join(away)}")
        if x.dtype != scheme.dtype or ids.dtype not in (torch.int32, torch.int64):
            return TypeError(
                f"{name}: expected x {scheme.dtype} and ids int32 or int64, found {x.dtype} and {ids.dtype}"
            )
        if x.dim() != 2 or x.shape[1] != scheme.hidden:
            return ValueError(f"{name}: x must be [M, {scheme.hidden}], found {list(x.shape)}")
        if ids.shape != (x.shape[0], scheme.top_k) or weights.shape != ids.shape:
            return ValueError(
                f"{name}: topk_ids and topk_weights must both be [{x.shape[0]}, {scheme.top_k}], found "
                f"{list(ids.shape)} and {list(weights.shape)}; the shared expert's slot is added here and never comes "
                "from the router"
            )
        if gate is not None and gate.shape != x.shape[:1]:
            return ValueError(f"{name}: shared_weights must be [{x.shape[0]}], found {list(gate.shape)}")
        if ids.device.type == "cpu" and (real := ids[: self.count]).numel():
            low, high = (int(value) for value in real.aminmax())
            if low < -1 or high >= experts:
                return ValueError(f"{name}: ids must lie in -1 .. {experts - 1}, found {low} .. {high}")
        return None


def _on(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor lies there; "cuda" without a number is any of them."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


@dataclass(frozen=True, eq=False)
class Routed:
    """One rank's real tokens, routed to ids that name their owner.

    Args:
        rank: whose tokens they are.
        x: ``[T, H]``.
        ids: ``[T, K]`` physical experts or slots, as in :attr:`Scheme.ids_per_rank`; always experts where the exchange
            takes those.
        weights: ``[T, K]`` float32, the routed scale in them.
        shared_slots: ``[T, 1]`` this rank's shared slot, where ids are slots.
        shared_weights: ``[T]`` float32, or None for 1.
    """

    rank: int
    x: Tensor
    ids: Tensor
    weights: Tensor
    shared_slots: Tensor | None
    shared_weights: Tensor | None

    @property
    def count(self) -> int:
        return self.x.shape[0]


def local_call(scheme: Scheme, part: Routed, x: Tensor, ids: Tensor, weights: Tensor, first: int) -> Call:
    """The local launch over all rows that arrived; rows ``first .. first + T`` are the rank's own.

    Args:
        scheme: the layer's.
        part: the rank's own tokens, which alone get the shared part here.
        x: ``[N, H]``.
        ids: ``[N, k]`` over all ranks; others' routes become -1.
        weights: ``[N, k]`` float32.
        first: the rank's own first row.
    """
    end = first + part.count
    mine = local_ids(ids, scheme.ids_per_rank, part.rank)
    gate = None
    if part.shared_weights is not None:
        gate = weights.new_ones(len(x))
        gate[first:end] = part.shared_weights
    if part.shared_slots is None:
        return Call(x, mine, weights, gate, shared_rows=(first, end))
    slot = mine.new_full((len(x), 1), -1)
    slot[first:end] = local_ids(part.shared_slots, scheme.ids_per_rank, part.rank).to(slot.dtype)
    ones = weights.new_ones(len(x), 1) if gate is None else gate[:, None]
    return Call(x, torch.cat((mine, slot), dim=1), torch.cat((weights, ones), dim=1))


def padded(pieces: Sequence[Tensor], x: Tensor) -> Tensor:
    """Outputs of all rounds, and zeros for rows of ``x`` that are padding."""
    if len(pieces) == 1 and len(pieces[0]) == len(x):
        return pieces[0]
    return torch.cat((*pieces, torch.zeros_like(x[sum(map(len, pieces)) :])))
