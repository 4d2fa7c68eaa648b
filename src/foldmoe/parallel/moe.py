"""``ExpertParallelMoE``: one folded layer over the ranks of a group.

What may differ between ranks is their tokens; every other choice comes from shared facts: the scheme, which ranks
compare once at load, and the token counts of all ranks, which they exchange (or which the caller states, as an engine
that pads its graphs does). Number and size of exchanges, whether a batch folds, and which kernels and tiles run it
depend on nothing else, so that a rank without tokens makes the same calls as all others.

In a CUDA graph: strategy "all_gather" or "symmetric", and ``tokens_across_ranks`` given; counts are otherwise read on
the host.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from foldmoe.backends.base import run_planned
from foldmoe.moe.slots import check_replicas, expert_load, to_physical
from foldmoe.parallel.agree import compare
from foldmoe.parallel.exchange import choose
from foldmoe.parallel.local import Routed, Tokens, padded
from foldmoe.parallel.remap import remap
from foldmoe.parallel.scheme import Dispatch, Order, Scheme
from foldmoe.parallel.transport import Transport, as_transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist

    from foldmoe.backends import Call
    from foldmoe.layer import FoldedMoE

Overflow = Literal["error", "rounds"]


class Batch(Protocol):
    """What an exchange makes of a dispatch."""

    @property
    def call(self) -> Call:
        """The local launch."""


class ExpertParallelMoE(torch.nn.Module):
    """A folded layer whose routed experts lie on R ranks; each rank adds the shared part of its own tokens.

    Args:
        layer: this rank's :class:`foldmoe.FoldedMoE`, made with its placement; one a rank for a simulation.
        group: a process group (None: the default one), or :func:`foldmoe.parallel.simulate`'s. Layers and tokens are on
            its device, see :class:`foldmoe.parallel.DistributedTransport`.
        max_tokens_per_rank: capacity of one exchange; :meth:`buffer_bytes` follows from it.
        strategy: "all_gather", "all_to_all" or "symmetric", see :class:`foldmoe.parallel.Scheme`. Where ranks cannot
            write to each other's memory, "symmetric" becomes "all_gather" on all of them: ``fallback`` says why.
        order: "rank", or "route" for the same bits whatever the number of ranks.
        dtype: of x and y.
        result_dtype: of results on their way back; x's unless given. float32 rounds once, at the end, for twice the
            bytes. It rounds no x: a local layer gets that in a dtype which holds both.
        overflow: more tokens than capacity are an "error", the same on every rank, or run in "rounds".
        physical: ``[n, max_replicas]`` physical experts of each logical one (EPLB), -1 for none; the layer then holds
            physical experts. Ids are logical ones always.
        count_load: count routes per logical expert, see :meth:`load`.

    Raises:
        PlanMismatchError: ranks disagree on the plan or the scheme; the same error on every rank.
        ValueError: a layer that does not fit the group.
    """

    def __init__(
        self,
        layer: FoldedMoE | Sequence[FoldedMoE],
        group: Transport | dist.ProcessGroup | None,
        max_tokens_per_rank: int,
        strategy: Dispatch = "all_gather",
        *,
        order: Order = "rank",
        dtype: torch.dtype = torch.bfloat16,
        result_dtype: torch.dtype | None = None,
        overflow: Overflow = "error",
        physical: Tensor | None = None,
        count_load: bool = False,
    ) -> None:
        super().__init__()
        self.transport = as_transport(group)
        self.layers = torch.nn.ModuleList([layer] if isinstance(layer, torch.nn.Module) else layer)
        plans = [one.plan for one in self.local_layers]
        self.scheme = Scheme.of(
            plans[0], max_tokens_per_rank, dispatch=strategy, order=order, dtype=dtype, result_dtype=result_dtype
        )
        self.name = plans[0].layer
        self.overflow = overflow
        if len(plans) != len(self.transport.ranks):
            raise ValueError(
                f"{self.name}: {len(self.transport.ranks)} ranks are played here, with {len(plans)} layers"
            )
        placed = None if physical is None else physical.tolist()
        facts = self.scheme.facts() | {"overflow": overflow, "physical": placed}
        compare([{plan.layer: plan.decision() | facts} for plan in plans], self.transport)
        self._check_places()
        if physical is not None:
            check_replicas(physical)
            if (last := int(physical.max())) >= (held := sum(self.scheme.experts_per_rank)):
                raise ValueError(f"{self.name}: physical expert {last} is on no rank; they hold 0 .. {held - 1}")
        self.physical = None if physical is None else physical.to(self.transport.device)
        self.num_logical = sum(self.scheme.experts_per_rank) if physical is None else physical.shape[0]
        device = self.transport.device
        self._load = torch.zeros(len(plans), self.num_logical, dtype=torch.int64, device=device) if count_load else None
        self._strays = torch.zeros(1, dtype=torch.int64, device=device)
        chosen = choose(self.scheme, self.transport, self._strays, self.name)
        self.scheme, self.exchange, self.fallback = chosen.scheme, chosen.exchange, chosen.fallback
        self._last: dict[str, int] = {}

    @property
    def local_layers(self) -> list[FoldedMoE]:
        """One for each rank that is played here."""
        return list(self.layers)  # type: ignore[arg-type]

    def _check_places(self) -> None:
        """Placements fit the group; looked at on all ranks alike, so that none is left waiting."""
        mine = [one.plan.placement for one in self.local_layers]
        places = self.transport.gather_objects([(p.ep_rank, p.ep_size, p.tp_size) for p in mine])
        wanted = [(rank, self.transport.size, 1) for rank in range(self.transport.size)]
        for rank, (found, expected) in enumerate(zip(places, wanted, strict=True)):
            if found != expected:
                raise ValueError(
                    f"{self.name}: rank {rank} of the group holds the shard of ep_rank {found[0]} of {found[1]}, "
                    f"tp_size {found[2]}; expected ep_rank {rank} of {self.transport.size}, tp_size 1"
                )

    def buffer_bytes(self) -> dict[str, int]:
        """Bytes that an exchange at capacity takes at most, by buffer."""
        return self.scheme.buffers()

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        shared_weights: Tensor | None = None,
        routed_scale: float = 1.0,
        num_valid_tokens: int | None = None,
        tokens_across_ranks: Sequence[int] | None = None,
    ) -> Tensor:
        """This rank's own tokens through the whole layer; every rank of the group must call it.

        Args:
            x: ``[M, H]`` in ``dtype``; M differs between ranks and may be 0.
            topk_ids: ``[M, K]`` int32 or int64 logical experts over all ranks; -1 adds nothing.
            topk_weights: ``[M, K]`` float32.
            shared_weights: ``[M]``; 1 where None.
            routed_scale: multiplies the routed sum.
            num_valid_tokens: rows from here on are padding; their output is zero.
            tokens_across_ranks: real tokens of every rank, the same list everywhere, where the caller knows them;
                exchanged otherwise.

        Returns:
            ``[M, H]`` in ``dtype``.

        Raises:
            ValueError, TypeError: more tokens than capacity (on every rank), or arguments that do not fit, or lie on
                another device than the group's: on every rank, or with ``tokens_across_ranks`` here alone, since no
                counts are exchanged that could tell the others. Those run into the group's timeout.
            GroupError: another rank has left, or did not answer in the group's timeout (gloo; see
                :class:`foldmoe.parallel.GroupError` for NCCL).
        """
        tokens = Tokens(x, topk_ids, topk_weights, shared_weights, num_valid_tokens)
        return self.forward_ranks([tokens], routed_scale=routed_scale, tokens_across_ranks=tokens_across_ranks)[0]

    @torch.no_grad()
    def forward_ranks(
        self, batches: Sequence[Tokens], *, routed_scale: float = 1.0, tokens_across_ranks: Sequence[int] | None = None
    ) -> list[Tensor]:
        """:meth:`forward` for every rank that is played here.

        Raises:
            ValueError, GroupError: see :meth:`forward`.
        """
        counts = self._agree_on_counts(batches, tokens_across_ranks)
        capacity, largest = self.scheme.capacity, max(counts)
        if largest > capacity and self.overflow == "error":
            found = ", ".join(f"rank {rank} has {n} tokens" for rank, n in enumerate(counts) if n > capacity)
            raise ValueError(
                f"{self.name}: {found}, max_tokens_per_rank is {capacity}; raise it, or run with overflow='rounds'"
            )
        outputs: list[list[Tensor]] = [[] for _ in batches]
        rounds = -(-largest // capacity)
        for start in range(0, largest, capacity):
            rows = min(capacity, largest - start)
            parts = [
                self.route(rank, batch.rows(start, max(start, min(start + rows, batch.count))), routed_scale)
                for rank, batch in zip(self.transport.ranks, batches, strict=True)
            ]
            for pieces, y in zip(outputs, self._exchange(parts, rows), strict=True):
                pieces.append(y)
        self._count_load(batches)
        self._last = {"rounds": rounds, "rows": min(largest, capacity), "tokens": sum(counts)}
        return [padded(pieces, batch.x) for pieces, batch in zip(outputs, batches, strict=True)]

    def _exchange(self, parts: Sequence[Routed], rows: int) -> list[Tensor]:
        local = self.dispatch(parts, rows)
        results = [
            self.run_local(layer, batch.call, rows) for layer, batch in zip(self.local_layers, local, strict=True)
        ]
        return self.combine(local, results)

    def dispatch(self, parts: Sequence[Routed], rows: int) -> list[Any]:
        """Tokens to the ranks of their experts; ``rows`` is the largest count of any rank. Gives local batches."""
        return list(self.exchange.dispatch(self.transport, parts, rows))

    def combine(self, batches: Sequence[Any], results: Sequence[Tensor]) -> list[Tensor]:
        """Results of the local batches back to their tokens: ``[T, H]`` in ``dtype`` for each rank played here."""
        rounded = [result.to(self.scheme.result_dtype) for result in results]
        return [total.to(self.scheme.dtype) for total in self.exchange.combine(self.transport, batches, rounded)]

    def run_local(self, layer: FoldedMoE, call: Call, agreed_rows: int) -> Tensor:
        """The local launch.

        Whether it folds, and which kernels and tiles run it, depend on ``agreed_rows``, the largest token count of any
        rank, which all know, and on nothing that reached this one. With R ranks of M tokens each, one rank has about
        M * K routes and M shared rows: as a layer timed at M tokens has.
        """
        if not len(call.x):
            return torch.empty_like(call.x)
        call = replace(call, most_rows=self.scheme.local_rows(agreed_rows))
        return run_planned(layer.packed, layer.plan, call, agreed_rows)

    def route(self, rank: int, tokens: Tokens, routed_scale: float) -> Routed:
        """Logical experts to physical ones, to slots where the exchange wants them; the scale goes into the weights."""
        ids, weights, gate = tokens.topk_ids, tokens.topk_weights.to(torch.float32), tokens.shared_weights
        gate = None if gate is None else gate.to(torch.float32)
        if routed_scale != 1.0:
            weights = weights * routed_scale
        counted = self.scheme.slot or self.exchange.takes_experts  # by the remap, or by the kernel that packs
        if ids.device.type != "cpu" and (self.physical is not None or not counted):
            ids = self._without_strays(ids)
        if self.physical is not None:
            ids = to_physical(ids, self.physical, checked=True)
        if self.exchange.takes_experts or not self.scheme.slot:
            return Routed(rank, tokens.x, ids, weights, None, gate)
        k = self.scheme.top_k
        ids, weights = remap(ids, weights, self.scheme.slots, rank, top_k=k, shared_weights=gate, strays=self._strays)
        return Routed(rank, tokens.x, ids[:, :k], weights[:, :k], ids[:, k:], gate)

    def _without_strays(self, ids: Tensor) -> Tensor:
        """Ids that are no expert's become -1 and are counted: a GPU cannot raise for them without being waited for."""
        known = (ids >= 0) & (ids < self.num_logical)
        self._strays += ((ids != -1) & ~known).sum()
        return torch.where(known, ids, -1)

    def _agree_on_counts(self, batches: Sequence[Tokens], stated: Sequence[int] | None) -> list[int]:
        """Real tokens of every rank; -1 from a rank whose arguments do not fit, so that no other rank waits for it.

        Where they are stated nothing is exchanged, and the others do wait.
        """
        device = self.transport.device
        problems = [batch.problem(self.name, self.scheme, self.num_logical, device) for batch in batches]
        mine = [-1 if problem else batch.count for problem, batch in zip(problems, batches, strict=True)]
        if stated is not None:
            counts = list(stated)
            known = [counts[rank] for rank in self.transport.ranks] if len(counts) == self.transport.size else None
            if not any(problems) and known != mine:
                problems = [ValueError(f"{self.name}: tokens_across_ranks says {counts}, found {mine} here")]
        else:
            ours = [torch.tensor([n], device=self.transport.device) for n in mine]
            counts = self.transport.all_gather(ours)[0].flatten().tolist()
        for problem in problems:
            if problem:
                raise problem
        if refused := [rank for rank, count in enumerate(counts) if count < 0]:
            raise ValueError(f"{self.name}: the arguments of rank {refused[0]} do not fit; its own error says why")
        return counts

    def _count_load(self, batches: Sequence[Tokens]) -> None:
        if self._load is None:
            return
        for n, batch in enumerate(batches):
            self._load[n] += expert_load(batch.topk_ids[: batch.count], self.num_logical)

    def warm(self, tokens: int, ids: torch.dtype, *, gated: bool) -> None:
        """One call with ``tokens`` on every rank, routed over all experts; every rank must make it. It adds no load.

        Args:
            ids: dtype of topk_ids. gated: with ``shared_weights``.
        """
        device, k = self.transport.device, self.scheme.top_k
        routes = torch.arange(tokens * k, device=device).view(tokens, k) % self.num_logical
        batch = Tokens(
            torch.zeros(tokens, self.scheme.hidden, dtype=self.scheme.dtype, device=device),
            routes.to(ids),
            torch.full((tokens, k), 1 / max(1, k), device=device),
            torch.ones(tokens, device=device) if gated else None,
        )
        ranks, load = self.transport, None if self._load is None else self._load.clone()
        self.forward_ranks([batch] * len(ranks.ranks), tokens_across_ranks=[tokens] * ranks.size)
        if self._load is not None and load is not None:
            self._load.copy_(load)  # in place: a captured graph goes on adding to this tensor

    def load(self) -> Tensor:
        """Routes per logical routed expert over all ranks and calls so far, ``[n]`` int64; every rank must call it.

        Real tokens only, and neither shared slots nor replicas count apart.

        Raises:
            ValueError: without ``count_load=True``.
        """
        if self._load is None:
            raise ValueError(f"{self.name}: load is not counted; pass count_load=True")
        return self.transport.all_gather(list(self._load))[0].sum(0)

    def stats(self) -> dict[str, Any]:
        """The last call (rounds, rows a rank and exchange, tokens over all ranks), and the local layer's own facts.

        ``ids_out_of_range`` counts on GPUs alone; on a CPU such an id is an error. ``fallback`` says why another
        strategy runs than was asked for.

        Raises:
            GroupError: a rank did not write its part of an exchange in time ("symmetric").
        """
        self.exchange.check()
        mine: dict[str, Any] = {"ranks": self.transport.size, **self._last, "ids_out_of_range": int(self._strays)}
        if self.fallback:
            mine["fallback"] = self.fallback
        return self.local_layers[0].stats() | mine
