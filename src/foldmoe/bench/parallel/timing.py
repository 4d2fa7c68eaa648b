"""Timing over ranks: the rules of :mod:`foldmoe.bench.timing`, and every measurement starts on all ranks together.

All ranks draw the same order; a rank's clock is its own, and what is reported is the slowest rank's median. A step that
the host takes part in is called, not captured, and its time is from call to end. Steps run until they have had
:data:`BUDGET` seconds or all rounds, at least :data:`LEAST` rounds: a long step varies less, and all ranks agree on the
number after the warm-up.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from foldmoe.bench.timing import captured

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WARM_UP = 1
LEAST = 3
BUDGET = 0.08
REPLAYS = 3


@dataclass(frozen=True)
class Timed:
    """Seconds: median, lowest and highest of the slowest rank."""

    median: float
    low: float
    high: float


def interleaved(
    steps: Mapping[str, tuple[Callable[[int], object], bool]], *, inputs: int, rounds: int, device: torch.device
) -> dict[str, Timed]:
    """Time steps against one another; every rank must call this with the same names.

    Args:
        steps: by name, with whether a CUDA graph may hold it.
        inputs: how many sets of inputs the steps rotate over.
        rounds: that count.
        device: where steps run.
    """
    timers = {name: _timer(step, graph, inputs, device) for name, (step, graph) in steps.items()}
    seconds = {name: list[float]() for name in timers}
    order, draw, token = list(timers), random.Random(0), torch.zeros(1, device=device)
    took = dict.fromkeys(timers, 0.0)
    for _ in range(WARM_UP):
        for name in order:
            dist.all_reduce(token)
            started = time.perf_counter()
            timers[name]()
            took[name] = time.perf_counter() - started
    enough = _rounds(took, rounds)
    for turn in range(max(enough.values())):
        draw.shuffle(order)
        for name in order:
            if turn < enough[name]:
                dist.all_reduce(token)
                seconds[name].append(timers[name]())
    mine = {name: (statistics.median(taken), min(taken), max(taken)) for name, taken in seconds.items()}
    everybody: list[dict[str, tuple[float, float, float]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return {name: Timed(*max(found[name] for found in everybody)) for name in timers}


def _rounds(took: Mapping[str, float], most: int) -> dict[str, int]:
    """Rounds of each step, the same on all ranks, from what one round of it takes on the slowest."""
    everybody: list[dict[str, float]] = [dict(took)] * dist.get_world_size()
    dist.all_gather_object(everybody, dict(took))
    slowest = {name: max(found[name] for found in everybody) for name in took}
    return {name: min(most, max(LEAST, int(BUDGET / max(each, 1e-9)))) for name, each in slowest.items()}


def _timer(step: Callable[[int], object], graph: bool, inputs: int, device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return lambda: _clock(lambda: [step(turn) for turn in range(inputs)]) / inputs
    run: Callable[[], object] = lambda: [step(turn) for turn in range(inputs)]  # noqa: E731
    if graph:
        run = captured(step, inputs, error_mode="thread_local").replay
    replays = REPLAYS if graph else 1

    def timed() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if graph:
            run()  # a backlog: what follows never waits for the host
        start.record()
        for _ in range(replays):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / replays / inputs

    return timed


def _clock(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def skew(step: Callable[[int], object], inputs: int, device: torch.device) -> float:
    """The slower rank's seconds summed input by input, over the slowest rank's sum. 1 without GPUs.

    Args:
        step: one that no rank waits in.
    """
    if device.type != "cuda":
        return 1.0
    graphs = [captured(lambda _, turn=turn: step(turn), 1, error_mode="thread_local") for turn in range(inputs)]  # type: ignore[misc]
    found: list[list[float]] = []
    for _ in range(LEAST):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(inputs + 1)]
        for graph in graphs:
            graph.replay()
        events[0].record()
        for graph, event in zip(graphs, events[1:], strict=True):
            graph.replay()
            event.record()
        events[-1].synchronize()
        found.append([float(start.elapsed_time(end)) for start, end in pairwise(events)])
    mine = [statistics.median(taken) for taken in zip(*found, strict=True)]
    everybody: list[list[float]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    together = [max(taken) for taken in zip(*everybody, strict=True)]
    return float(sum(together) / max(sum(taken) for taken in everybody))


def link_seconds(copy: Callable[[], object], device: torch.device) -> float:
    """One large copy, all ranks at once: the slowest rank's median."""
    return interleaved({"": (lambda _: copy(), True)}, inputs=1, rounds=5, device=device)[""].median
