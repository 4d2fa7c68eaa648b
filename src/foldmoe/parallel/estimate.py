"""What one layer costs under expert parallelism: bytes over each rank's link, seconds of each phase.

Routing is taken as uniform, K distinct experts a token, and M tokens on every rank. Phases follow each other; nothing
is overlapped, and no rank waits for one that got more experts. What exchanges take stands in
:mod:`foldmoe.parallel.exchange_times`, what local launches take in :mod:`foldmoe.parallel.kernel_times`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import comb
from typing import TYPE_CHECKING, Any, Literal

from foldmoe.moe.spec import Placement
from foldmoe.parallel.exchange_times import MEASURED
from foldmoe.parallel.kernel_times import EFFICIENCY, Floor, Measured
from foldmoe.parallel.links import Link, find_link
from foldmoe.parallel.scheme import Dispatch, Scheme, largest_buffers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.planner import CheckpointPlan, LayerPlan

ESTIMATED: tuple[Dispatch, ...] = ("all_gather", "all_to_all", "symmetric")

_X_AND_Y = 4
"""Bytes a column that the local layer reads and writes: bf16 both ways."""


@dataclass(frozen=True)
class Phases:
    """One layer, one strategy, M tokens on every rank.

    Args:
        layer: its name.
        tokens: M.
        strategy: of the exchange.
        dispatch_bytes, combine_bytes: in the busier direction of rank 0's link, on average; it holds the most experts.
        dispatch, local, combine: seconds.
        together: seconds beyond these phases.
        source: of ``local``: "table" (measured), "fit" (of the Hopper backend's measured times), "floor".
    """

    layer: str
    tokens: int
    strategy: Dispatch
    dispatch_bytes: int
    combine_bytes: int
    dispatch: float
    local: float
    combine: float
    together: float
    source: Literal["table", "fit", "floor"]

    @property
    def total(self) -> float:
        return self.dispatch + self.local + self.combine + self.together


@dataclass(frozen=True)
class Estimate:
    """All layers of a checkpoint, and what the figures rest on.

    Args:
        rows: layer by layer, then by tokens and strategy.
        buffers: bytes of a rank's exchange buffers by strategy, at the largest batch, for the layer that needs most.
        link, floor: rates.
        efficiency: by which the floor is divided where nothing else tells how long the local launch takes.
        skipped: layers without an estimate, and why.
    """

    ranks: int
    rows: tuple[Phases, ...]
    buffers: dict[Dispatch, int]
    link: Link
    floor: Floor | None
    efficiency: float
    skipped: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self)
        for row, phases in zip(found["rows"], self.rows, strict=True):
            row["total"] = phases.total
        return found


def estimate(
    plan: CheckpointPlan,
    tokens: Sequence[int],
    *,
    link: str = "nvlink",
    efficiency: float | None = None,
    measured: Measured | None = None,
) -> Estimate:
    """Expected times of every layer that is planned here.

    Args:
        plan: made for ``ep_size`` ranks.
        tokens: tokens on every rank.
        link: see :func:`foldmoe.parallel.links.find_link`.
        efficiency: of the local layer against its floor, where ``measured`` has no time; None: as fitted to
            measurements for the Hopper backend, :data:`foldmoe.parallel.kernel_times.EFFICIENCY` for others.
        measured: times of one rank's layer.

    Raises:
        ValueError: no tokens, an efficiency outside 0 .. 1, tensor parallelism, a link or device without figures, or a
            table of another layer.
    """
    if not tokens or min(tokens) < 1:
        raise ValueError(f"tokens must be numbers from 1 up, found {list(tokens)}")
    if efficiency is not None and not 0 < efficiency <= 1:
        raise ValueError(f"efficiency must lie between 0 and 1, found {efficiency}")
    if plan.placement.tp_size > 1:
        raise ValueError("an estimate covers expert parallelism alone; leave --tp at 1")
    way, rows, skipped, floor = find_link(link, plan.device), [], [], None
    ways = [strategy for strategy in ESTIMATED if strategy != "symmetric" or way.shared_memory]
    for layer in plan.layers:
        if layer.spec.top_k < 0 or layer.backend == "stock":
            skipped.append(f"{layer.layer}: {'top-k is not known' if layer.spec.top_k < 0 else 'the engine keeps it'}")
            continue
        if measured:
            measured.check(layer.spec.local(plan.placement))
        floor = Floor.of(plan.device, fp8=layer.activations != "bf16")
        schemes = [Scheme.of(layer, max(tokens), dispatch=strategy) for strategy in ways]
        rows += [phases(layer, s, count, way, floor, efficiency, measured) for count in tokens for s in schemes]
    skipped += [f"{row.layer}: the engine keeps it" for row in plan.stock]
    buffers = largest_buffers(plan.layers, max(tokens), ways)
    return Estimate(plan.placement.ep_size, tuple(rows), buffers, way, floor, efficiency or EFFICIENCY, tuple(skipped))


def phases(
    plan: LayerPlan,
    scheme: Scheme,
    tokens: int,
    link: Link,
    floor: Floor,
    efficiency: float | None = None,
    measured: Measured | None = None,
) -> Phases:
    """See :func:`estimate`."""
    copies = scheme.ranks - 1.0 if scheme.dispatch == "all_gather" else remote_rows(scheme)
    going, back = (round(tokens * copies * nbytes) for nbytes in (scheme.wire.row_bytes, scheme.result_bytes))
    exchange = MEASURED[scheme.dispatch]
    known, work = measured.at(tokens) if measured else None, local_work(plan, tokens)
    source: Literal["table", "fit", "floor"] = "table"
    if known is None and efficiency is None and plan.backend == "hopper":
        known, source = floor.hopper_seconds(*work), "fit"
    elif known is None:
        known, source = floor.seconds(*work) / (efficiency or EFFICIENCY), "floor"
    return Phases(
        plan.layer, tokens, scheme.dispatch, going, back,
        exchange.dispatch.seconds(going, link.bandwidth), known, exchange.combine.seconds(back, link.bandwidth),
        exchange.beyond(known, plan.strategy), source,
    )  # fmt: skip


def remote_rows(scheme: Scheme) -> float:
    """Rows that rank 0 gets from other ranks, and results it returns to them, for each of its own tokens, on average.

    It sends as many where ranks hold equally many experts, and fewer where it holds one more.
    """
    return (scheme.ranks - 1) * _reaches(sum(scheme.experts_per_rank), scheme.experts_per_rank[0], scheme.top_k)


def _reaches(experts: int, held: int, top_k: int) -> float:
    """Chance that one of a token's experts is among the ``held`` ones."""
    return 1 - comb(experts - held, top_k) / comb(experts, top_k)


def local_work(plan: LayerPlan, tokens: int) -> tuple[float, float]:
    """Bytes and operations of rank 0's launch, with ``tokens`` on every rank, on average."""
    s, place = plan.spec, plan.placement
    held = len(Placement(place.ep_size, 0).experts(s.routed.count))
    share = s.top_k / s.routed.count  # of tokens, to one expert
    everywhere = tokens * place.ep_size
    touched = held * (1 - (1 - share) ** everywhere)
    arriving = tokens + (everywhere - tokens) * _reaches(s.routed.count, held, s.top_k)
    nbytes = touched * s.routed.nbytes(s.hidden) + arriving * _X_AND_Y * s.hidden
    columns = everywhere * held * share * s.routed.width
    if s.shared is not None:
        nbytes += (s.routed if plan.strategy == "slot" else s.shared).nbytes(s.hidden)
        columns += tokens * s.shared.width
    return nbytes, 6.0 * s.hidden * columns
