"""Timing over ranks: the rules of :mod:`foldmoe.bench.timing`, and every measurement starts on all ranks together.

All ranks draw the same order; a rank's clock is its own, and what is reported is the slowest rank's median. A step that
the host takes part in is called, not captured, and its time is from call to end.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from foldmoe.bench.timing import captured

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WARM_UP = 2
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
    for turn in range(WARM_UP + rounds):
        draw.shuffle(order)
        for name in order:
            dist.all_reduce(token)
            took = timers[name]()
            if turn >= WARM_UP:
                seconds[name].append(took)
    mine = {name: (statistics.median(taken), min(taken), max(taken)) for name, taken in seconds.items()}
    everybody: list[dict[str, tuple[float, float, float]]] = [mine] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    return {name: Timed(*max(found[name] for found in everybody)) for name in timers}


def _timer(step: Callable[[int], object], graph: bool, inputs: int, device: torch.device) -> Callable[[], float]:
    if device.type != "cuda":
        return lambda: _clock(lambda: [step(turn) for turn in range(inputs)]) / inputs
    run: Callable[[], object] = lambda: [step(turn) for turn in range(inputs)]  # noqa: E731
    if graph:
        run = captured(step, inputs, error_mode="thread_local").replay

    def timed() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        run()  # a backlog: what follows never waits for the host, as long as it is a graph
        start.record()
        for _ in range(REPLAYS):
            run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / REPLAYS / inputs

    return timed


def _clock(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def link_seconds(copy: Callable[[], object], device: torch.device) -> float:
    """One large copy, all ranks at once: the slowest rank's median."""
    return interleaved({"": (lambda _: copy(), True)}, inputs=1, rounds=5, device=device)[""].median
