"""One rank of ``foldmoe bench parallel``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from foldmoe.bench import shapes, versions
from foldmoe.bench.parallel import timing
from foldmoe.bench.parallel.layers import folds, layer_of, policy, whole
from foldmoe.bench.parallel.result import TRANSPORTS, ParallelRequest, ParallelResult, ParallelRow
from foldmoe.moe import Placement
from foldmoe.moe.spec import in_words
from foldmoe.parallel import DistributedTransport, ExpertParallelMoE, Scheme, Tokens
from foldmoe.parallel.estimate import phases, remote_rows
from foldmoe.parallel.kernel_times import Floor
from foldmoe.parallel.links import find_link
from foldmoe.parallel.mailbox import HEADER, Unavailable, open_mailboxes
from foldmoe.planner.devices import resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from foldmoe.layer import FoldedMoE
    from foldmoe.parallel.scheme import Dispatch

_PHASES = ("dispatch", "local", "combine", "total")
_COPY_BYTES = 2**26

READY = "compiled"
"""File beside the store: kernels need not be waited for any longer."""


def work(rank: int, request: ParallelRequest, ranks: int, store: str, out: str) -> None:
    """Join the group, time, and let rank 0 write the result; runs in a process of its own."""
    started, on_gpu = monotonic(), torch.cuda.device_count() >= ranks
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is not used here, and can upset a shared host
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
        timeout=timedelta(seconds=120), device_id=device if on_gpu else None,
    )  # fmt: skip
    try:
        for result in Rank(request, rank, ranks, device).run(Path(store).with_name(READY)):
            if rank == 0:
                result.save(out)
                for row in result.rows[-1:]:
                    say = f"{row.tokens} tokens of {', '.join(map(str, request.tokens))} measured"
                    print(f"{say}, {monotonic() - started:.0f} s after the start", file=sys.stderr, flush=True)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, eq=False)
class Way:
    """One combination of transport, scheme and arm: a layer for each set of weights."""

    transport: str
    scheme: str
    arm: str
    layers: list[ExpertParallelMoE]

    @property
    def graph(self) -> bool:
        """An all-to-all asks for its counts on the host."""
        return self.layers[0].scheme.dispatch != "all_to_all"


class Rank:
    """Weights, layers and inputs of one rank.

    Args:
        request: what to time.
        rank, ranks: place in the group.
        device: where.
    """

    def __init__(self, request: ParallelRequest, rank: int, ranks: int, device: torch.device) -> None:
        self.request, self.rank, self.ranks, self.device = request, rank, ranks, device
        self.spec = whole(request, ranks)
        self.place = Placement(ep_size=ranks, ep_rank=rank)
        self.refused: dict[str, str] = {}
        self.transport = DistributedTransport()

    def run(self, ready: Path) -> Iterator[ParallelResult]:
        """The result as it grows, a number of tokens at a time; every rank must call this.

        Args:
            ready: the local layers run once this file is there.
        """
        ways = self._ways()
        link, how = self._link()
        self._warm_up(ways)
        while not ready.exists():
            sleep(0.05)
        result = ParallelResult(
            self.request,
            shapes.SHAPES[self.request.shape].what,
            in_words(self.spec.local(self.place)),
            self.ranks,
            ways[0].layers[0].stats()["backend"] if ways else "none",
            link,
            how,
            versions.collect(self.device),
            refused=self.refused,
            command=self.request.command,
        )
        for tokens in self.request.tokens if ways else ():
            result.rows.extend(self._rows(ways, tokens, link))
            yield result

    def _ways(self) -> list[Way]:
        found = []
        numbers = range(2 if self.device.type == "cuda" else 1)
        for scheme, arm in folds(self.request):
            if arm == "dual-stream" and self.device.type == "cpu":
                self.refused["dual-stream"] = "a CPU has no second stream"
                continue
            asked = policy(self.request, scheme, arm, self.device)
            layers = [layer_of(self.spec, self.ranks, self.rank, n, asked, self.device) for n in numbers]
            if scheme == "slot" and layers[0].plan.strategy != "slot":
                self.refused["slot"] = "; ".join(layers[0].plan.reasons)
                continue
            found += [self._way(name, scheme, arm, layers) for name in self.request.transports]
        ran = [way for way in found if way.layers[0].fallback is None]
        for way in found:
            if way.layers[0].fallback:
                self.refused[way.transport] = way.layers[0].fallback
        return ran

    def _way(self, transport: str, scheme: str, arm: str, layers: list[FoldedMoE]) -> Way:
        strategy: Dispatch = TRANSPORTS[transport]  # type: ignore[assignment]
        most = max(self.request.tokens)
        return Way(
            transport, scheme, arm,
            [ExpertParallelMoE(layer, self.transport, most, strategy) for layer in layers],
        )  # fmt: skip

    def _warm_up(self, ways: list[Way]) -> None:
        """Compile the exchanges' kernels, which is done while those of the local layers are."""
        drawn = shapes.random_batch(self.spec, 1, torch.Generator(self.device).manual_seed(self.rank))
        for way in ways:
            moe = way.layers[0]
            batches = moe.dispatch([moe.route(self.rank, Tokens(drawn.x, drawn.topk_ids, drawn.topk_weights), 1.0)], 1)
            moe.combine(batches, [torch.zeros_like(batch.call.x) for batch in batches])

    def _link(self) -> tuple[float, str]:
        """Bytes a second and direction that a plain copy to the next rank reaches, all ranks at once."""
        try:
            (box,) = open_mailboxes(self.transport, _COPY_BYTES)
        except Unavailable:
            rows = torch.randint(0, 256, (self.ranks * 16, 2**16), dtype=torch.uint8, device=self.device)
            equal = [[16] * self.ranks]
            seconds = timing.link_seconds(lambda: self.transport.all_to_all([rows], equal, equal), self.device)
            return (self.ranks - 1) * 2**20 / seconds, "an all-to-all of equal parts"
        there = box.kept[(self.rank + 1) % self.ranks][HEADER : HEADER + _COPY_BYTES]
        here = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, device=self.device)
        seconds = timing.link_seconds(lambda: there.copy_(here), self.device)
        return _COPY_BYTES / seconds, "copies into the next rank's memory, all ranks at once"

    def _rows(self, ways: list[Way], tokens: int, link: float) -> list[ParallelRow]:
        generator = torch.Generator(self.device).manual_seed(1000 * tokens + self.rank)
        spec = self.spec
        batches = []
        for _ in range(self.request.inputs):
            drawn = shapes.random_batch(spec, tokens, generator)
            batches.append(Tokens(drawn.x, drawn.topk_ids, drawn.topk_weights))
        with torch.inference_mode():
            steps: dict[str, tuple[Callable[[int], object], bool]] = {}
            for number, way in enumerate(ways):
                steps |= {f"{number} {phase}": step for phase, step in self._steps(way, batches).items()}
            bits = [way.layers[0].forward_ranks([batches[0]])[0] for way in ways]
            times = timing.interleaved(steps, inputs=len(batches), rounds=self.request.rounds, device=self.device)
            first = {(way.scheme, way.arm): number for number, way in reversed(list(enumerate(ways)))}
            waits = {fold: timing.skew(steps[f"{n} local"][0], len(batches), self.device) for fold, n in first.items()}
        base = {(way.scheme, way.arm): y for way, y in zip(ways, bits, strict=True) if way.transport == "allgather"}
        folded = [times[f"{n} local"].median for n, w in enumerate(ways) if (w.scheme, w.arm) == ("native", "folded")]
        rows = []
        for number, (way, y) in enumerate(zip(ways, bits, strict=True)):
            dispatch, local, combine, total = (times[f"{number} {phase}"] for phase in _PHASES)
            scheme = way.layers[0].scheme
            least = remote_rows(scheme) * tokens * (scheme.wire.row_bytes + scheme.result_bytes)
            expected = base.get((way.scheme, way.arm))
            row = ParallelRow(
                tokens, way.transport, way.scheme, way.arm, dispatch.median, local.median, combine.median, total.median,
                total.low, total.high,
                graph=way.graph and self.device.type == "cuda",
                sent=_sent(scheme, tokens),
                bound=min(folded) + least / link if folded else None,
                predicted=self._predicted(way, tokens),
                same_bits=None if expected is None else self._everywhere(torch.equal(y, expected)),
                skew=waits[way.scheme, way.arm],
            )  # fmt: skip
            rows.append(row)
        return rows

    def _everywhere(self, mine: bool) -> bool:
        return all(self.transport.gather_objects([mine]))

    def _steps(self, way: Way, batches: list[Tokens]) -> dict[str, tuple[Callable[[int], object], bool]]:
        """Each phase on its own and the whole layer; turn by turn another input and set of weights."""
        tokens, layers = batches[0].count, way.layers
        counts = [tokens] * self.ranks
        arrived, results = [], []
        for turn, batch in enumerate(batches):
            moe = layers[turn % len(layers)]
            (local,) = moe.dispatch([moe.route(self.rank, batch, 1.0)], tokens)
            arrived.append(local)
            results.append(moe.run_local(moe.local_layers[0], local.call, tokens))

        def dispatch(turn: int) -> object:
            moe = layers[turn % len(layers)]
            return moe.dispatch([moe.route(self.rank, batches[turn], 1.0)], tokens)

        def local_layer(turn: int) -> object:
            moe = layers[turn % len(layers)]
            return moe.run_local(moe.local_layers[0], arrived[turn].call, tokens)

        def combine(turn: int) -> object:
            return layers[turn % len(layers)].combine([arrived[turn]], [results[turn]])

        def total(turn: int) -> object:
            return layers[turn % len(layers)].forward_ranks([batches[turn]], tokens_across_ranks=counts)

        return {
            "dispatch": (dispatch, way.graph),
            "local": (local_layer, True),
            "combine": (combine, way.graph),
            "total": (total, way.graph),
        }

    def _predicted(self, way: Way, tokens: int) -> float | None:
        """What ``foldmoe plan --estimate`` says, by its own figures for the link and the device."""
        moe, device = way.layers[0], resolve(self.device)
        plan = moe.local_layers[0].plan
        try:
            link, floor = find_link("nvlink", device), Floor.of(device, fp8=plan.activations != "bf16")
        except ValueError:
            return None
        return phases(plan, moe.scheme, tokens, link, floor).total


def _sent(scheme: Scheme, tokens: int) -> int:
    copies = scheme.ranks - 1.0 if scheme.dispatch == "all_gather" else remote_rows(scheme)
    return round(tokens * copies * (scheme.wire.row_bytes + scheme.result_bytes))
