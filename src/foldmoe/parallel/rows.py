"""Launches of :mod:`foldmoe.parallel.row_kernels` for one layer, and the constants that all row kernels share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foldmoe.backends import Call
from foldmoe.backends.triton.launch import launch_in_order
from foldmoe.moe.slots import ends
from foldmoe.parallel import row_kernels as kernels
from foldmoe.parallel.mailbox import dependent

if TYPE_CHECKING:
    from foldmoe.parallel.local import Routed
    from foldmoe.parallel.scheme import Scheme

_WIRE = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_BLOCK = 512
"""Tokens that a program of positions_kernel counts at once."""


@dataclass(frozen=True, eq=False)
class Scattered:
    """One rank's rows, sorted by destination, before the host knows how many they are.

    Args:
        kept: ``[T, row_bytes]`` the rank's own.
        sent: ``[T * min(R - 1, K), row_bytes]``; only the first ones hold anything.
        places: ``[T, R]`` int32 a token's row among those for each rank, -1 for none.
        counts: ``[R]`` int64 rows for each rank.
    """

    kept: Tensor
    sent: Tensor
    places: Tensor
    counts: Tensor


class Rows:
    """Rows of one scheme.

    Args:
        scheme: the layer's.
        strays: one int64 element that counts ids out of range.
    """

    def __init__(self, scheme: Scheme, strays: Tensor) -> None:
        self.scheme, self.strays = scheme, strays
        group = scheme.wire.group
        columns = triton.next_power_of_2(group or scheme.hidden)
        self.routes = {"K": scheme.top_k, "KP": triton.next_power_of_2(max(scheme.top_k, 1))}
        self.tile = {
            "GROUP": group,
            "GROUPS": triton.next_power_of_2(-(-scheme.hidden // columns)) if group else 1,
            "COLUMNS": columns,
        }
        self.columns = triton.next_power_of_2(scheme.hidden)
        self.warps: dict[str, Any] = {"num_warps": 8 if self.columns >= 2048 else 4}

    def pack(self, part: Routed, rows: int) -> Tensor:
        """``[rows, row_bytes]``: the rank's tokens, then places that hold none."""
        scheme, (x, ids, weights) = self.scheme, tokens_of(part)
        message = torch.empty(rows, scheme.wire.row_bytes, dtype=torch.uint8, device=x.device)
        launch_in_order(
            kernels.pack_kernel, (rows,),
            x, ids, weights, message, self.strays, x.stride(0), ids.stride(0), weights.stride(0), part.count,
            scheme.hidden, sum(scheme.experts_per_rank), scheme.wire.row_bytes, **self.routes, **self.tile,
            **self.warps,
        )  # fmt: skip
        return message

    def scatter(self, part: Routed) -> Scattered:
        """A row to each rank that holds one of a token's experts."""
        scheme, (x, ids, weights), tokens = self.scheme, tokens_of(part), part.count
        kept, sent = (
            torch.empty(tokens * copies, scheme.wire.row_bytes, dtype=torch.uint8, device=x.device)
            for copies in (1, min(scheme.ranks - 1, scheme.top_k))
        )
        places = torch.empty(tokens, scheme.ranks, dtype=torch.int32, device=x.device)
        counts = torch.empty(scheme.ranks, dtype=torch.int64, device=x.device)
        launch_in_order(
            kernels.positions_kernel, (scheme.ranks,),
            ids, ends(scheme.experts_per_rank, x.device), places, counts, ids.stride(0), tokens, part.rank,
            **self.routes, RANKS=scheme.ranks, BLOCK=_BLOCK,
        )  # fmt: skip
        if tokens:
            launch_in_order(
                kernels.scatter_kernel, (tokens,),
                x, ids, weights, kept, sent, places, counts, self.strays, x.stride(0), ids.stride(0),
                weights.stride(0), scheme.hidden, sum(scheme.experts_per_rank), scheme.wire.row_bytes, **self.routes,
                RANKS=scheme.ranks, **self.tile, **self.warps,
            )  # fmt: skip
        return Scattered(kept, sent, places, counts)

    def unpack(self, part: Routed, kept: Tensor, arrived: Tensor, own_first: int) -> Call:
        """The local launch over rows ``kept``, then ``arrived``; from ``own_first`` on they are the rank's own."""
        scheme, held, lines = self.scheme, self.scheme.experts_per_rank, len(kept) + len(arrived)
        x, ids, weights, gates = self.landing(part, lines)
        if lines:
            launch_in_order(
                kernels.unpack_kernel, (lines,),
                x, ids, weights, *self.gating(part, weights, gates), kept, arrived, part.count, own_first, len(kept),
                scheme.hidden, sum(held[: part.rank]), held[part.rank], scheme.wire.row_bytes, **self.routes,
                **self.tile, **self.placing(part), PDL=dependent(x.device), **self.warps,
            )  # fmt: skip
        return self.call(part, x, ids, weights, gates, own_first)

    def reduce(self, parts: Tensor, rows: int, count: int) -> Tensor:
        """``parts [R * rows, H]`` to the sums ``[count, H]`` of the first ``count`` rows of each rank, in x's dtype."""
        return self._reduce(count, parts, parts, None, rows, 0)

    def gather(self, scattered: Scattered, own: Tensor, parts: Tensor, rank: int) -> Tensor:
        """Own results ``[T, ..]`` and those that came back for :meth:`scatter`'s rows to sums ``[T, H]``."""
        return self._reduce(len(scattered.kept), own.contiguous(), parts, scattered, 0, rank)

    def _reduce(
        self, count: int, own: Tensor, parts: Tensor, scattered: Scattered | None, rows: int, rank: int
    ) -> Tensor:
        scheme = self.scheme
        y = torch.empty(count, scheme.hidden, dtype=scheme.dtype, device=own.device)
        if count:
            launch_in_order(
                kernels.reduce_kernel, (count,),
                y, own, parts, self.strays if scattered is None else scattered.places,
                self.strays if scattered is None else scattered.counts, rows, rank, scheme.hidden,
                RANKS=scheme.ranks, COLUMNS=self.columns, SCATTERED=scattered is not None, **self.warps,
            )  # fmt: skip
        return y

    def landing(self, part: Routed, lines: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """What the local launch reads, to be filled: x, ids, weights, and gates where it takes any."""
        scheme, device = self.scheme, part.x.device
        x = torch.empty(lines, scheme.hidden, dtype=scheme.local_dtype, device=device)
        ids = torch.empty(lines, scheme.local_top_k, dtype=torch.int32, device=device)
        weights = torch.empty(lines, scheme.local_top_k, dtype=torch.float32, device=device)
        gated = part.shared_weights is not None and not scheme.slot
        return x, ids, weights, torch.empty(lines, dtype=torch.float32, device=device) if gated else None

    def gating(self, part: Routed, weights: Tensor, gates: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gates to fill and the rank's own gate; anything where there are none."""
        gate = part.shared_weights
        return weights if gates is None else gates, weights if gate is None else gate.contiguous()

    def placing(self, part: Routed) -> dict[str, Any]:
        """Constants of place_row."""
        scheme = self.scheme
        return {"WIRE": _WIRE[scheme.dtype], "SLOT": int(scheme.slot), "GATED": part.shared_weights is not None}

    def call(self, part: Routed, x: Tensor, ids: Tensor, weights: Tensor, gates: Tensor | None, own_first: int) -> Call:
        """The local launch; the slot scheme has the shared part in the ids."""
        own = None if self.scheme.slot else (own_first, own_first + part.count)
        return Call(x, ids, weights, gates, shared_rows=own)


def tokens_of(part: Routed) -> tuple[Tensor, Tensor, Tensor]:
    """x, ids and weights, each row in one piece."""
    x, ids, weights = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (part.x, part.ids, part.weights))
    return x, ids, weights
