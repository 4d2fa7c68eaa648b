"""All-gather and all-to-all on GPUs: each step between two collectives is one kernel, and sums have the same bits.

| strategy | dispatch | combine |
| --- | --- | --- |
| all_gather | pack, all-gather of one message, unpack | all-to-all of equal parts, sum |
| all_to_all, order "rank" | positions, scatter, counts (read by the host), all-to-all, unpack | all-to-all, sum |

:mod:`foldmoe.parallel.gather` and :mod:`foldmoe.parallel.scatter` are the same in torch expressions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.parallel.gather import AllGather, GatheredBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.backends import Call
    from foldmoe.parallel.local import Routed
    from foldmoe.parallel.rows import Rows, Scattered
    from foldmoe.parallel.scheme import Scheme
    from foldmoe.parallel.transport import Transport


class DeviceAllGather(AllGather):
    """See the module.

    Args:
        scheme: the layer's.
        rows: its kernels.
    """

    takes_experts = True

    def __init__(self, scheme: Scheme, rows: Rows) -> None:
        super().__init__(scheme)
        self._rows = rows

    def _pack(self, part: Routed, rows: int) -> Tensor:
        return self._rows.pack(part, rows)

    def _batch(self, part: Routed, buffer: Tensor, rows: int) -> GatheredBatch:
        lines = buffer.flatten(0, 1)
        return GatheredBatch(self._rows.unpack(part, lines, lines[:0], part.rank * rows), part.count, rows)

    def _sum(self, arrived: Tensor, batch: GatheredBatch, ranks: int) -> Tensor:
        return self._rows.reduce(arrived, batch.rows, batch.count)


@dataclass(frozen=True, eq=False)
class DeviceBatch:
    """The rows of one rank's local launch: its own first, then other ranks' in their order.

    Args:
        call: the local launch.
        part: the rank's own tokens. out: what it sent.
        sent, received: rows to and from every rank.
    """

    call: Call
    part: Routed
    out: Scattered
    sent: list[int]
    received: list[int]


class DeviceAllToAll:
    """See the module.

    Args:
        scheme: the layer's, order "rank".
        rows: its kernels.
    """

    takes_experts = True

    def __init__(self, scheme: Scheme, rows: Rows) -> None:
        self.scheme = scheme
        self._rows = rows

    def check(self) -> None:
        """Collectives raise by themselves."""

    def dispatch(self, transport: Transport, parts: Sequence[Routed], rows: int) -> list[DeviceBatch]:
        """Tokens to the ranks of their experts, see :meth:`foldmoe.parallel.scatter.AllToAll.dispatch`."""
        outs = [self._rows.scatter(part) for part in parts]
        one = [[1] * transport.size] * len(parts)
        coming = transport.all_to_all([out.counts for out in outs], one, one)
        numbers = torch.stack([torch.stack((out.counts, n)) for out, n in zip(outs, coming, strict=True)]).tolist()
        sent, received = ([pair[way] for pair in numbers] for way in (0, 1))
        filled = [out.sent[: sum(to)] for out, to in zip(outs, sent, strict=True)]
        arrived = transport.all_to_all(filled, sent, received)
        return [
            DeviceBatch(self._rows.unpack(part, out.kept, lines, 0), part, out, to, from_)
            for part, out, lines, to, from_ in zip(parts, outs, arrived, sent, received, strict=True)
        ]

    def combine(self, transport: Transport, batches: Sequence[DeviceBatch], results: Sequence[Tensor]) -> list[Tensor]:
        """Results of each local launch to ``[T, H]`` sums of each rank's own tokens, in x's dtype."""
        going = [result[batch.part.count :] for batch, result in zip(batches, results, strict=True)]
        back = transport.all_to_all(going, [b.received for b in batches], [b.sent for b in batches])
        return [
            self._rows.gather(batch.out, result, lines, batch.part.rank)
            for batch, result, lines in zip(batches, results, back, strict=True)
        ]
