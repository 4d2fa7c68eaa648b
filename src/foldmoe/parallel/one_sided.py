"""One-sided exchange: each rank writes its tokens into the others' memory, and they write their results into its own.

It moves the bytes of an all-to-all (a token goes to the ranks of its experts alone) in the shapes of an all-gather
(``rows`` places a rank), so that nothing waits for the host and a CUDA graph holds all of it. Sums have the order of
the all-gather's: the same bits. Each source has a flag: rows of a rank, its own first, are read as soon as that rank
has written.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foldmoe.backends import Call
from foldmoe.moe.slots import ends
from foldmoe.parallel import one_sided_kernels as kernels
from foldmoe.parallel.mailbox import HEADER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.parallel.local import Routed
    from foldmoe.parallel.mailbox import Mailbox
    from foldmoe.parallel.scheme import Scheme
    from foldmoe.parallel.transport import Transport

INTERPRETED = bool(triton.knobs.runtime.interpret)

_WIRE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


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

    def __init__(self, scheme: Scheme, mailboxes: Sequence[Mailbox], strays: Tensor) -> None:
        self.scheme = scheme
        self.mailboxes = {box.rank: box for box in mailboxes}
        self._strays = strays
        group = scheme.wire.group
        columns = triton.next_power_of_2(group or scheme.hidden)
        self._layout = {
            "HEADER": HEADER,
            "K": scheme.top_k,
            "KP": triton.next_power_of_2(max(scheme.top_k, 1)),
            "RANKS": scheme.ranks,
        }
        self._tile = {
            "GROUP": group,
            "GROUPS": triton.next_power_of_2(-(-scheme.hidden // columns)) if group else 1,
            "COLUMNS": columns,
        }
        self._columns = triton.next_power_of_2(scheme.hidden)

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
        x, ids, weights = (rows_of if rows_of.stride(1) == 1 else rows_of.contiguous() for rows_of in _tokens(part))
        kernels.send_kernel[(rows,)](
            x, ids, weights, box.peers, ends(scheme.ids_per_rank, box.peers.device), box.state, self._strays,
            x.stride(0), ids.stride(0), weights.stride(0), part.count, rows, part.rank, scheme.hidden,
            sum(scheme.ids_per_rank), box.half, scheme.wire.row_bytes, **self._layout, **self._tile, **self._warps,
        )  # fmt: skip

    def _receive(self, part: Routed, rows: int) -> OneSidedBatch:
        scheme, box = self.scheme, self.mailboxes[part.rank]
        places, held = scheme.ranks * rows, scheme.ids_per_rank
        x = torch.empty(places, scheme.hidden, dtype=scheme.local_dtype, device=box.peers.device)
        ids = torch.empty(places, scheme.local_top_k, dtype=torch.int32, device=x.device)
        weights = torch.empty(places, scheme.local_top_k, dtype=torch.float32, device=x.device)
        gate = part.shared_weights
        gates = None if gate is None or scheme.slot else torch.empty(places, dtype=torch.float32, device=x.device)
        kernels.receive_kernel[(places,)](
            x, ids, weights, weights if gates is None else gates, weights if gate is None else gate.contiguous(),
            box.peers, box.state, box.alarm, part.count, rows, part.rank, scheme.hidden, sum(held[: part.rank]),
            held[part.rank], box.half, scheme.wire.row_bytes, box.limit, **self._layout, **self._tile,
            WIRE=_WIRE[scheme.dtype], SLOT=int(scheme.slot), GATED=gate is not None, CLOCK=box.clock, **self._warps,
        )  # fmt: skip
        first = part.rank * rows
        own = None if scheme.slot else (first, first + part.count)
        return OneSidedBatch(Call(x, ids, weights, gates, shared_rows=own), part, rows)

    def _return(self, batch: OneSidedBatch, result: Tensor) -> None:
        scheme, box, ids = self.scheme, self.mailboxes[batch.part.rank], batch.call.topk_ids
        kernels.return_kernel[((scheme.ranks - 1) * batch.rows,)](
            result.contiguous(), ids, box.peers, box.state, batch.rows, box.rank, scheme.hidden, ids.stride(0),
            box.half, **self._layout, COLUMNS=self._columns, **self._warps,
        )  # fmt: skip

    def _sum(self, batch: OneSidedBatch, result: Tensor) -> Tensor:
        scheme, part, box = self.scheme, batch.part, self.mailboxes[batch.part.rank]
        y = torch.empty(part.count, scheme.hidden, dtype=scheme.dtype, device=result.device)
        ids = part.ids if part.ids.stride(-1) == 1 else part.ids.contiguous()
        kernels.sum_kernel[(batch.rows,)](
            y, result.contiguous(), ids, box.peers, ends(scheme.ids_per_rank, y.device), box.state, box.alarm,
            ids.stride(0), part.count, batch.rows, box.rank, scheme.hidden, box.half, box.limit, **self._layout,
            COLUMNS=self._columns, CLOCK=box.clock, **self._warps,
        )  # fmt: skip
        return y

    @property
    def _warps(self) -> dict[str, Any]:
        return {"num_warps": 8 if self._columns >= 2048 else 4}


def _tokens(part: Routed) -> tuple[Tensor, Tensor, Tensor]:
    return part.x, part.ids, part.weights
