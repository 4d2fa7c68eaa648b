"""One-sided exchange: each rank writes its tokens into the others' memory, and they write their results into its own.

It moves the bytes of an all-to-all (a token goes to the ranks of its experts alone) in the shapes of an all-gather
(``rows`` places a rank), so that nothing waits for the host and a CUDA graph holds all of it. Sums have the order of
the all-gather's: the same bits. Each source has a flag: rows of a rank, its own first, are read as soon as that rank
has written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from foldmoe.backends.triton.launch import launch_in_order
from foldmoe.moe.slots import ends
from foldmoe.parallel import one_sided_kernels as kernels
from foldmoe.parallel.mailbox import HEADER
from foldmoe.parallel.rows import Rows, tokens_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.backends import Call
    from foldmoe.parallel.local import Routed
    from foldmoe.parallel.mailbox import Mailbox
    from foldmoe.parallel.scheme import Scheme
    from foldmoe.parallel.transport import Transport

INTERPRETED = bool(triton.knobs.runtime.interpret)


@dataclass(frozen=True, eq=False)
class OneSidedBatch:
    """All ranks' places on one rank.

    Args:
        call: the local launch.
        part: the rank's own tokens.
        rows: places of each rank.
    """

    call: Call
    part: Routed
    rows: int


class OneSided:
    """See the module.

    Args:
        scheme: the layer's.
        mailboxes: one for each rank that is played here, of :meth:`Scheme.mailbox_bytes`.
        strays: one int64 element that counts ids out of range.
    """

    takes_experts = True

    def __init__(self, scheme: Scheme, mailboxes: Sequence[Mailbox], strays: Tensor) -> None:
        self.scheme = scheme
        self.mailboxes = {box.rank: box for box in mailboxes}
        self._rows = Rows(scheme, strays)
        self._layout = {"HEADER": HEADER, "RANKS": scheme.ranks, **self._rows.routes}
        self._tile, self._columns, self._warps = self._rows.tile, self._rows.columns, self._rows.warps

    def check(self) -> None:
        """Look, without waiting for the device, whether every rank has answered so far.

        Raises:
            GroupError: naming the rank that has not.
        """
        for box in self.mailboxes.values():
            box.check()

    def dispatch(self, transport: Transport, parts: Sequence[Routed], rows: int) -> list[OneSidedBatch]:
        """Tokens to the ranks of their experts.

        Args:
            transport: not needed: the mailboxes are the way.
            parts: tokens of each rank that is played here.
            rows: places a rank, the same everywhere, at least any rank's tokens.

        Raises:
            GroupError: another rank did not answer in an earlier exchange.
        """
        self.check()
        for part in parts:
            self._send(part, rows)
        return [self._receive(part, rows) for part in parts]

    def combine(
        self, transport: Transport, batches: Sequence[OneSidedBatch], results: Sequence[Tensor]
    ) -> list[Tensor]:
        """Results ``[R * rows, H]`` of each local launch to ``[T, H]`` sums of each rank's own tokens, in x's dtype."""
        for batch, result in zip(batches, results, strict=True):
            self._return(batch, result)
        return [self._sum(batch, result) for batch, result in zip(batches, results, strict=True)]

    def _send(self, part: Routed, rows: int) -> None:
        scheme, box = self.scheme, self.mailboxes[part.rank]
        x, ids, weights = tokens_of(part)
        launch_in_order(
            kernels.send_kernel, (rows,),
            x, ids, weights, box.peers, ends(scheme.experts_per_rank, box.peers.device), box.state, self._rows.strays,
            x.stride(0), ids.stride(0), weights.stride(0), part.count, rows, part.rank, scheme.hidden,
            sum(scheme.experts_per_rank), box.half, scheme.wire.row_bytes, **self._layout, **self._tile, **self._warps,
            PDL=box.dependent,
        )  # fmt: skip

    def _receive(self, part: Routed, rows: int) -> OneSidedBatch:
        scheme, box = self.scheme, self.mailboxes[part.rank]
        places, held = scheme.ranks * rows, scheme.experts_per_rank
        x, ids, weights, gates = self._rows.landing(part, places)
        launch_in_order(
            kernels.receive_kernel, (places,),
            x, ids, weights, *self._rows.gating(part, weights, gates), box.peers, box.state, box.alarm, part.count,
            rows, part.rank, scheme.hidden, sum(held[: part.rank]), held[part.rank], box.half, scheme.wire.row_bytes,
            box.limit, **self._layout, **self._tile, **self._rows.placing(part), CLOCK=box.clock, **self._warps,
            PDL=box.dependent, launch_pdl=box.dependent,
        )  # fmt: skip
        return OneSidedBatch(self._rows.call(part, x, ids, weights, gates, part.rank * rows), part, rows)

    def _return(self, batch: OneSidedBatch, result: Tensor) -> None:
        scheme, box, ids = self.scheme, self.mailboxes[batch.part.rank], batch.call.topk_ids
        launch_in_order(
            kernels.return_kernel, ((scheme.ranks - 1) * batch.rows,),
            result.contiguous(), ids, box.peers, box.state, batch.rows, box.rank, scheme.hidden, ids.stride(0),
            box.half, **self._layout, COLUMNS=self._columns, PDL=box.dependent, **self._warps,
        )  # fmt: skip

    def _sum(self, batch: OneSidedBatch, result: Tensor) -> Tensor:
        scheme, part, box = self.scheme, batch.part, self.mailboxes[batch.part.rank]
        y = torch.empty(part.count, scheme.hidden, dtype=scheme.dtype, device=result.device)
        ids = part.ids if part.ids.stride(-1) == 1 else part.ids.contiguous()
        launch_in_order(
            kernels.sum_kernel, (batch.rows,),
            y, result.contiguous(), ids, box.peers, ends(scheme.experts_per_rank, y.device), box.state, box.alarm,
            ids.stride(0), part.count, batch.rows, box.rank, scheme.hidden, box.half, box.limit, **self._layout,
            COLUMNS=self._columns, CLOCK=box.clock, PDL=box.dependent, launch_pdl=box.dependent, **self._warps,
        )  # fmt: skip
        return y
