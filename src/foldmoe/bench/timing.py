"""How arms are timed: one place for the rules.

1. Every arm runs the same inputs; inputs (and on a GPU weights) rotate, so that no arm lives off a cache.
2. Arms are interleaved: every round runs all of them, in an order drawn anew, so that drift hits all alike.
3. The first rounds are thrown away; what is reported is the median, with the lowest and highest.
4. On a GPU an arm is a CUDA graph of several calls, replayed behind a backlog, timed by events: no launch gaps.
5. The same arm against itself (odd against even rounds, which run the same inputs) is the noise floor.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Step = Callable[[int], object]
"""One call of an arm on the i-th set of inputs."""

WARM_UP = 3


@dataclass(frozen=True)
class Timing:
    """Seconds a call of one arm, one number a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def low(self) -> float:
        return min(self.seconds)

    @property
    def high(self) -> float:
        return max(self.seconds)

    @property
    def noise(self) -> float:
        """Relative difference of the medians of odd and even rounds; 0 where fewer than 4 leave it unknown."""
        if len(self.seconds) < 4:
            return 0.0
        halves = [statistics.median(self.seconds[start::2]) for start in (0, 1)]
        return abs(halves[0] - halves[1]) / self.median


def interleaved(arms: Mapping[str, Step], *, inputs: int, rounds: int, device: torch.device) -> dict[str, Timing]:
    """Time all arms against one another by the rules above.

    Args:
        arms: by name.
        inputs: how many sets of inputs the steps rotate over.
        rounds: rounds that count.
        device: where the arms run.
    """
    if device.type == "cuda":
        timers = {name: _graph_timer(step, inputs) for name, step in arms.items()}
    else:
        timers = {name: _clock_timer(step) for name, step in arms.items()}
    order, seconds = list(timers), {name: list[float]() for name in timers}
    draw = random.Random(0)
    for turn, batch in enumerate([*(i % inputs for i in range(WARM_UP)), *rotation(inputs, rounds)]):
        draw.shuffle(order)
        for name in order:
            took = timers[name](batch)
            if turn >= WARM_UP:
                seconds[name].append(took)
    return {name: Timing(tuple(taken)) for name, taken in seconds.items()}


def rotation(inputs: int, rounds: int) -> list[int]:
    """Which inputs each round runs: odd rounds the same as even ones, half a turn apart, so that caches forget them.

    Args:
        inputs: how many sets there are.
        rounds: one less is paired where they are odd.
    """
    pairs, order = (rounds + 1) // 2, list[int]()
    for start in range(0, pairs, inputs):
        size = min(inputs, pairs - start)
        for even in range(size):
            order += [even, (even + (size + 1) // 2) % size]
    return order[:rounds]


def _clock_timer(step: Step) -> Callable[[int], float]:
    def run(turn: int) -> float:
        start = time.perf_counter()
        step(turn)
        return time.perf_counter() - start

    return run


def captured(step: Step, inputs: int, *, error_mode: str = "global") -> torch.cuda.CUDAGraph:
    """All inputs once in one graph, after a run outside of it that compiles and allocates.

    Args:
        error_mode: see ``torch.cuda.graph``; "thread_local" beside NCCL, whose watchdog asks the device for events.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for turn in range(inputs):
            step(turn)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=error_mode):
        for turn in range(inputs):
            step(turn)
    return graph


def _graph_timer(step: Step, inputs: int, replays: int = 4) -> Callable[[int], float]:
    """Events around ``replays`` replays that queue behind one more."""
    graph = captured(step, inputs)

    def run(_: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / replays / inputs

    return run


def median_seconds(step: Callable[[], object], device: torch.device, rounds: int = 12) -> float:
    """A single operation on its own, for ceilings."""
    return interleaved({"": lambda _: step()}, inputs=1, rounds=rounds, device=device)[""].median
