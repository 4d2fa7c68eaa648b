"""All-gather dispatch: every rank sees all tokens, runs its own experts, and returns one sum a token to its owner.

The way back is an all-to-all of equal parts and a sum in the order of ranks: the bytes of a reduce-scatter, in an order
that no topology changes. Shapes depend on the largest token count of any rank alone, so that nothing waits for the
device where the caller states the counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.parallel.local import Routed, local_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.backends import Call
    from foldmoe.parallel.scheme import Scheme
    from foldmoe.parallel.transport import Transport


@dataclass(frozen=True, eq=False)
class GatheredBatch:
    """All ranks' tokens on one rank, ``rows`` places a rank.

    Args:
        call: the local launch.
        count: the rank's own tokens.
        rows: places of each rank.
    """

    call: Call
    count: int
    rows: int


class AllGather:
    """See the module."""

    takes_experts = False
    """Whether routes come as physical experts in both schemes: ids that are none are then left out and counted, and the
    shared slot is added where tokens arrive, so that no :func:`foldmoe.parallel.remap` runs before."""

    def __init__(self, scheme: Scheme) -> None:
        self.scheme = scheme

    def check(self) -> None:
        """Collectives raise by themselves."""

    def dispatch(self, transport: Transport, parts: Sequence[Routed], rows: int) -> list[GatheredBatch]:
        """All tokens to all ranks.

        Args:
            transport: the group.
            parts: tokens of each rank that is played here.
            rows: places a rank, the same everywhere, at least any rank's tokens.
        """
        gathered = transport.all_gather([self._pack(part, rows) for part in parts])
        return [self._batch(part, buffer, rows) for part, buffer in zip(parts, gathered, strict=True)]

    def _pack(self, part: Routed, rows: int) -> Tensor:
        packed = self.scheme.wire.pack(part.x, part.ids, part.weights)
        return torch.cat((packed, self.scheme.wire.blank(rows - part.count, packed.device)))

    def _batch(self, part: Routed, buffer: Tensor, rows: int) -> GatheredBatch:
        x, ids, weights = self.scheme.wire.unpack(buffer.flatten(0, 1), self.scheme.local_dtype)
        call = local_call(self.scheme, part, x, ids, weights, part.rank * rows)
        return GatheredBatch(call, part.count, rows)

    def combine(
        self, transport: Transport, batches: Sequence[GatheredBatch], results: Sequence[Tensor]
    ) -> list[Tensor]:
        """Results ``[R * rows, H]`` of each local launch to ``[T, H]`` float32 sums of each rank's own tokens."""
        equal = [[batch.rows] * transport.size for batch in batches]
        arrived = transport.all_to_all(results, equal, equal)
        return [self._sum(parts, batch, transport.size) for parts, batch in zip(arrived, batches, strict=True)]

    def _sum(self, arrived: Tensor, batch: GatheredBatch, ranks: int) -> Tensor:
        """Added one rank after the other: a reduction over the dimension could choose another order."""
        parts = arrived.unflatten(0, (ranks, batch.rows))[:, : batch.count]
        total: Tensor = parts[0].to(torch.float32, copy=True)
        for part in parts[1:]:
            total += part
        return total
