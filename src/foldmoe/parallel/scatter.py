"""All-to-all dispatch: a token goes once to each rank that holds one of its experts; its own rank keeps it anyway.

| step | what travels | how many rows |
| --- | --- | --- |
| counts | rows from every rank to every rank | one number each; the host waits for them |
| dispatch | token rows (:mod:`foldmoe.parallel.wire`) | one a token and rank |
| combine, order "rank" | sums over a rank's experts | one a token and rank |
| combine, order "route" | experts' outputs, unweighted | one a route |

Shared routes never travel: in both orders they belong to the first rows of the token's own rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.backends import Call
from foldmoe.moe.slots import local_ids, owners
from foldmoe.parallel.local import Routed, local_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.parallel.scheme import Scheme
    from foldmoe.parallel.transport import Transport


@dataclass(frozen=True, eq=False)
class Outgoing:
    """One rank's rows, sorted by destination.

    Args:
        part: the rank's tokens.
        packed: ``[T, row_bytes]`` every token once.
        owner: ``[T, K]`` rank of each route; R for none.
        token: ``[S]`` the token of each row that is sent.
        sent: rows to each rank; none to itself.
    """

    part: Routed
    packed: Tensor
    owner: Tensor
    token: Tensor
    sent: list[int]

    @property
    def routes(self) -> list[int]:
        """Routes to each rank, its own included."""
        ranks = len(self.sent)
        return torch.bincount(self.owner.flatten(), minlength=ranks + 1)[:ranks].tolist()


@dataclass(frozen=True, eq=False)
class ScatteredBatch:
    """The rows of one rank's local launch: its own first, then other ranks' in their order.

    Args:
        call: the local launch.
        out: what the rank sent, which tells where results belong.
        returned: result rows for each rank (for itself: rows that stay).
        shared: leading rows that hold shared parts alone (order "route").
    """

    call: Call
    out: Outgoing
    returned: list[int]
    shared: int


class AllToAll:
    """See the module."""

    takes_experts = False

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def check(self) -> None:
        """Collectives raise by themselves."""

    def dispatch(self, transport: Transport, parts: Sequence[Routed], rows: int) -> list[ScatteredBatch]:
        """Each token to the ranks of its experts. ``rows`` is not needed: counts are exchanged."""
        going = [self._outgoing(part) for part in parts]
        counts = transport.all_gather([torch.tensor(out.sent, device=out.packed.device) for out in going])
        matrix = counts[0].tolist()  # [source][destination], the same on every rank
        coming = [[matrix[source][out.part.rank] for source in range(transport.size)] for out in going]
        rows_sent = [out.packed.index_select(0, out.token) for out in going]
        arrived = transport.all_to_all(rows_sent, [out.sent for out in going], coming)
        return [self._batch(*one) for one in zip(going, arrived, coming, strict=True)]

    def _outgoing(self, part: Routed) -> Outgoing:
        ranks = self.scheme.ranks
        owner = owners(part.ids, self.scheme.ids_per_rank)
        wanted = torch.zeros(part.count, ranks + 1, dtype=torch.bool, device=owner.device).scatter_(1, owner, True)
        wanted[:, part.rank] = False
        wanted = wanted[:, :ranks].t()
        packed = self.scheme.wire.pack(part.x, part.ids, part.weights)
        return Outgoing(part, packed, owner, wanted.nonzero()[:, 1], wanted.sum(1).tolist())

    def _batch(self, out: Outgoing, arrived: Tensor, coming: list[int]) -> ScatteredBatch:
        part, scheme = out.part, self.scheme
        x, ids, weights = scheme.wire.unpack(torch.cat((out.packed, arrived)), scheme.local_dtype)
        coming = [part.count if rank == part.rank else count for rank, count in enumerate(coming)]
        if scheme.order == "rank":
            return ScatteredBatch(local_call(scheme, part, x, ids, weights, 0), out, coming, 0)
        mine = local_ids(ids, scheme.ids_per_rank, part.rank)
        row, k = (mine >= 0).nonzero(as_tuple=True)  # own tokens' routes first, then by source, token and k
        shared = part.count if scheme.shared else 0
        first = mine.new_full((shared, 1), -1)
        if part.shared_slots is not None:
            first = local_ids(part.shared_slots, scheme.ids_per_rank, part.rank).to(mine.dtype)
        all_ids = torch.cat((first, mine[row, k][:, None]))
        call = Call(
            torch.cat((x[:shared], x.index_select(0, row))),
            all_ids,
            weights.new_ones(all_ids.shape),
            shared_rows=(0, 0 if part.shared_slots is not None else shared),
        )
        per_row = (mine >= 0).sum(1)
        own_first = [part.count, *(n for rank, n in enumerate(coming) if rank != part.rank)]
        sums = [int(block.sum()) for block in per_row.split(own_first)]
        others = iter(sums[1:])
        returned = [sums[0] if rank == part.rank else next(others) for rank in range(scheme.ranks)]
        return ScatteredBatch(call, out, returned, shared)

    def combine(
        self, transport: Transport, batches: Sequence[ScatteredBatch], results: Sequence[Tensor]
    ) -> list[Tensor]:
        """Results of each local launch to ``[T, H]`` float32 sums of each rank's own tokens."""
        by_route = self.scheme.order == "route"
        kept, going, to, back = [], [], [], []
        for batch, result in zip(batches, results, strict=True):
            rank = batch.out.part.rank
            own = batch.returned[rank]
            kept.append(result[batch.shared : batch.shared + own])
            going.append(result[batch.shared + own :])
            to.append(_without(batch.returned, rank))
            back.append(_without(batch.out.routes, rank) if by_route else batch.out.sent)
        arrived = transport.all_to_all(going, to, back)
        finish = self._by_route if by_route else self._by_rank
        return [
            finish(batch, result, own, rows.split(counts))
            for batch, result, own, rows, counts in zip(batches, results, kept, arrived, back, strict=True)
        ]

    def _by_rank(self, batch: ScatteredBatch, result: Tensor, own: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        out = batch.out
        total = torch.zeros(own.shape, dtype=torch.float32, device=own.device)
        for rank, (piece, token) in enumerate(zip(pieces, out.token.split(out.sent), strict=True)):
            if rank == out.part.rank:
                total += own
            else:
                total.index_add_(0, token, piece.to(torch.float32))  # a token stands there once: one order
        return total

    def _by_route(self, batch: ScatteredBatch, result: Tensor, own: Tensor, pieces: Sequence[Tensor]) -> Tensor:
        out, part = batch.out, batch.out.part
        outputs = torch.zeros(out.owner.numel(), self.scheme.hidden, dtype=torch.float32, device=own.device)
        ordered = [own if rank == part.rank else piece for rank, piece in enumerate(pieces)]
        place = out.owner.flatten().argsort(stable=True)[: sum(out.routes)]
        outputs[place] = torch.cat(ordered).to(torch.float32)
        outputs = outputs.view(part.count, self.scheme.top_k, self.scheme.hidden)
        weights = torch.where(out.owner < self.scheme.ranks, part.weights, 0.0)
        total = torch.zeros(part.count, self.scheme.hidden, dtype=torch.float32, device=own.device)
        for k in range(weights.shape[1]):
            total += weights[:, k, None] * outputs[:, k]
        if batch.shared:
            shared = result[: batch.shared].to(torch.float32)
            total += shared if part.shared_weights is None else part.shared_weights[:, None] * shared
        return total


def _without(counts: Sequence[int], rank: int) -> list[int]:
    """Counts by rank, none for ``rank`` itself."""
    return [0 if other == rank else count for other, count in enumerate(counts)]
