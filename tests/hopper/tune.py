"""Times on a Hopper GPU, for developers: every arm against the floor, then other tiles and prologues.

    python -m tests.hopper.tune [--token] [--tune [--write]] [SHAPE:M,M,.. ..]    # A:1,8,32,128,512,2048

Microseconds a layer over CUDA-graph replays of eight batches and two sets of weights, every kernel included. fold: one
launch; serial: routed, then shared; dual: both at once on two streams; pro: the prologue alone. ratio: fold / floor, a
floor being the larger of bytes at 4.62 TB/s and FLOPs at 1427 TFLOP/s (bf16: 776). --write keeps in the package's table
of measured tiles which ones won: others than the heuristic's must beat them by more than 1 %.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from multiprocessing import get_context
from statistics import median
from typing import NamedTuple

import torch

from foldmoe.backends.base import Call
from foldmoe.backends.hopper import heuristics, launch, tuned
from foldmoe.backends.hopper.batch import BOTH, ROUTED, SHARED, Weights
from foldmoe.backends.hopper.packing import pack_layer
from foldmoe.bench.shapes import random_weights
from foldmoe.formats import Format
from foldmoe.moe import Activation, ExpertSpec
from tests.hopper import tuned_table


class Shape(NamedTuple):
    """Experts here, experts in all, H, I, how routed experts are stored, top-k, how the shared expert is."""

    experts: int
    total: int
    hidden: int
    width: int
    stored: Format = Format.MXFP4
    top_k: int = 6
    common: Format = Format.FP8_128x128

    def geometry(self, activations: str) -> heuristics.Geometry:
        kind = "fp8" if self.stored.fp8 else self.stored.value
        blocks = -(-2 * self.width // 256), -(-self.hidden // 256)
        steps = -(-self.width // 128) * (2 if kind == "bf16" else 1)
        groups = {Format.BF16: 0, Format.FP8_32x32: 4}.get(self.common, 1)
        sizes = self.hidden, *blocks, *blocks, steps, steps, groups, 10.0, 10.0
        return heuristics.Geometry(*sizes, activations == "fp8_token", kind, int(kind == "fp8"))

    @property
    def powers(self) -> bool:
        """Scales of the shared expert are powers of two, as DeepSeek stores them beside MXFP4."""
        return self.stored is Format.MXFP4

    def precision(self, token: bool) -> str:
        return "bf16" if self.stored is Format.BF16 else "fp8_token" if token else "fp8"


SHAPES = {
    "A": Shape(256, 256, 4096, 2048),
    "A-tp4": Shape(256, 256, 4096, 512),
    "A-tp8": Shape(256, 256, 4096, 256),
    "B": Shape(32, 256, 4096, 2048),
    "C": Shape(48, 384, 5120, 2304, common=Format.FP8_32x32),
    "D": Shape(48, 384, 7168, 3072),
    "V3": Shape(256, 256, 7168, 2048, Format.FP8_128x128, 8),
    "GLM": Shape(128, 128, 4096, 1408, Format.FP8_128x128, 8),
    "GLM-bf16": Shape(128, 128, 4096, 1408, Format.BF16, 8, Format.BF16),
}
"""V4-Flash on one GPU, one TP4, TP8 and EP8 rank of it, one EP8 rank of V4.1-Flash and V4-Pro; DeepSeek-V3 and
GLM-4.5-Air on one GPU.
"""

TILES = (
    *((8, 8, 4), (8, 16, 4), (8, 32, 4), (8, 64, 4), (16, 32, 4), (16, 64, 4), (16, 64, 2), (16, 128, 2)),
    *((32, 32, 4), (32, 64, 4), (32, 64, 2), (32, 128, 2), (64, 64, 2), (64, 128, 2), (128, 128, 2)),
)
PROLOGUES = ((8192, 4096), (0, 4096), (0, 2048), (0, 1024), (0, 512))
"""heuristics.SMALL_ROUTES, heuristics.ROUTE_BLOCK"""


@dataclass
class Point:
    """Eight batches of ``tokens`` on one shape, and what they touch on average."""

    shape: str
    tokens: int

    def __post_init__(self) -> None:
        experts, total, hidden, width, stored, top_k, _ = SHAPES[self.shape]
        self.share = experts / total
        self.calls = []
        touched = routes = 0
        for seed in range(8):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.rand(self.tokens, total, generator=generator).argsort(dim=-1)[:, :top_k].to(torch.int32)
            ids = torch.where(ids < experts, ids, -1)
            touched += len(ids[ids >= 0].unique())
            routes += int((ids >= 0).sum())
            x = torch.randn(self.tokens, hidden, generator=generator).to(torch.bfloat16)
            gates = torch.rand(self.tokens, top_k, generator=generator)
            self.calls.append(Call(x.cuda(), ids.cuda(), gates.cuda()))
        size = 3 * hidden * width
        each, common, rate = {Format.MXFP4: (4.25 / 8, 1, 1.427e9), Format.BF16: (2, 2, 0.776e9)}.get(
            stored, (1, 1, 1.427e9)
        )
        self.floor = max(
            (touched / 8 * size * each + size * common) / 4.62e6, 2 * size * (routes / 8 + self.tokens) / rate
        )

    @property
    def routes(self) -> float:
        """Mean routes of an expert."""
        return self.tokens * SHAPES[self.shape].top_k / SHAPES[self.shape].total

    def choose(self, geometry: heuristics.Geometry) -> heuristics.HopperConfig:
        shape = SHAPES[self.shape]
        return heuristics.choose(geometry, self.tokens, shape.top_k * self.share, shape.experts, shape.powers)


def layer(shape: Shape, activations: str = "fp8") -> Weights:
    """Random weights of one layer, packed in place."""
    generator = torch.Generator("cuda").manual_seed(0)
    sets = [
        random_weights(ExpertSpec(count, shape.width, stored, e8m0_scales=powers), shape.hidden, generator)
        for count, stored, powers in ((shape.experts, shape.stored, False), (1, shape.common, shape.powers))
    ]
    return pack_layer(*sets, Activation(10.0), Activation(10.0), activations=activations, consume=True)  # type: ignore[arg-type]


def replay(calls: list, reps: int = 10) -> float:
    """Microseconds a call, of one graph of all calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in calls:
            call()
    times = []
    for _ in range(reps + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[2:]) / len(calls) * 1e3


def arm(weights: list[Weights], point: Point, **options: object) -> float:
    pairs = zip(weights * len(point.calls), point.calls, strict=False)
    return replay([partial(launch.run, w, call, route_share=point.share, **options) for w, call in pairs])


def prologue(weights: list[Weights], point: Point) -> float:
    def one(w: Weights, call: Call) -> None:
        launch.Step(w, call, launch.choose(w, call, point.share).config, BOTH, False).prologue()

    return replay([partial(one, w, call) for w, call in zip(weights * len(point.calls), point.calls, strict=False)])


def candidates(geometry: heuristics.Geometry, point: Point) -> list[heuristics.HopperConfig]:
    """Tiles within reach of the mean number of tokens an expert."""
    near = [size for size in TILES if point.routes / 4 <= size[0] <= max(8, 4 * point.routes)]
    near = [size for size in near if size[1] >= min(point.tokens, 32)]
    if geometry.scale_groups == 4:  # more would spill
        near = [(tokens, shared, wgs) for tokens, shared, wgs in near if shared <= (64 if wgs == 2 else 32)]
    if geometry.whole:  # equal tiles share a K loop
        near += [(tokens, tokens, warpgroups) for tokens, _, warpgroups in near]
    return [heuristics.build(geometry, *size) for size in dict.fromkeys(near)]


def warm(job: tuple[Shape, heuristics.HopperConfig, int, bool]) -> str | None:
    """Compile one config in a process of its own, on a layer of two experts (their number is no part of a kernel)."""
    shape, config, tokens, arms = job
    try:
        x = torch.randn(tokens, shape.hidden, device="cuda").to(torch.bfloat16)
        ids = torch.zeros(tokens, shape.top_k, dtype=torch.int32, device="cuda")
        activations = shape.precision(config.geometry.token_scales)
        for dependent in (True, False) if arms else (True,):
            call = Call(x, ids, torch.ones(tokens, shape.top_k, device="cuda"))
            launch.run(layer(shape._replace(experts=2), activations), call, config=config, dependent=dependent)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{config}: {str(error).splitlines()[0]}"
    return None


def compile_all(points: list[Point], tune: bool, token: bool) -> set[heuristics.HopperConfig]:
    """Fill Triton's cache; configs that do not run."""
    todo: dict[heuristics.HopperConfig, tuple[Shape, heuristics.HopperConfig, int, bool]] = {}
    for point in points:
        shape = SHAPES[point.shape]
        geometry = shape.geometry(shape.precision(token))
        for config in [point.choose(geometry), *(candidates(geometry, point) if tune else [])]:
            todo[config] = (shape, config, min(point.tokens, 64), not tune)
    with ProcessPoolExecutor(min(14, len(todo)), mp_context=get_context("spawn")) as pool:
        failed = {config: error for config, error in zip(todo, pool.map(warm, todo.values()), strict=True) if error}
    for error in failed.values():
        print("does not run:", error)
    return set(failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="*", default=["A:1,8,32,128,512,2048", "B:1,8,32,128,512,2048"])
    parser.add_argument("--tune", action="store_true", help="other tiles and prologues instead of other arms")
    parser.add_argument("--token", action="store_true", help="activations with one scale a token (fp8_token)")
    parser.add_argument("--write", action="store_true", help="keep what won in tuned.json")
    options = parser.parse_args()
    asked = [(name, sizes) for name, _, sizes in (p.partition(":") for p in options.points)]
    points = [Point(name, int(m)) for name, sizes in asked for m in sizes.split(",")]
    failed = compile_all(points, options.tune, options.token)
    held: tuple[str, list[Weights]] = ("", [])
    for point in points:
        if held[0] != point.shape:
            shape = SHAPES[point.shape]
            held = ("", [])
            held = (point.shape, [layer(shape, shape.precision(options.token)) for _ in range(2)])
        weights = held[1]
        chosen = launch.choose(weights[0], point.calls[0], point.share).config
        fold = arm(weights, point)
        print(f"{point.shape} M {point.tokens:5d} floor {point.floor:7.1f} fold {fold:7.1f}", end=" ")
        print(f"ratio {fold / point.floor:.2f} pro {prologue(weights, point):.1f}  {chosen.describe()}", flush=True)
        if options.tune:
            best = tune(weights, point, failed)
            if options.write:
                write(weights[0], point, best)
        else:
            serial = arm(weights, point, launches=(ROUTED, SHARED))
            dual = arm(weights, point, launches=(ROUTED, SHARED), side=torch.cuda.Stream())
            alone = arm(weights, point, dependent=False)
            print(f"    serial {serial:.1f} dual {dual:.1f} fold without dependent launch {alone:.1f}", flush=True)


def write(layer: Weights, point: Point, times: dict[heuristics.HopperConfig, float]) -> None:
    kept = tuned_table.merge(tuned.table(), layer, point.routes, times, point.choose(layer.geometry))
    tuned.TABLE.write_text(tuned_table.text(kept))
    tuned.table.cache_clear()


def tune(
    weights: list[Weights], point: Point, failed: set[heuristics.HopperConfig]
) -> dict[heuristics.HopperConfig, float]:
    geometry = weights[0].geometry
    configs = [c for c in dict.fromkeys([point.choose(geometry), *candidates(geometry, point)]) if c not in failed]
    best = dict.fromkeys(configs, inf)
    for _ in range(2):  # the card drifts: take turns
        for config in configs:
            best[config] = min(best[config], arm(weights, point, config=config))
    for config, time in sorted(best.items(), key=lambda item: item[1]):
        print(f"    {time:7.1f}  {config.describe()}", flush=True)
    kept = heuristics.SMALL_ROUTES, heuristics.ROUTE_BLOCK
    for small, block in PROLOGUES:
        if small or point.tokens * SHAPES[point.shape].top_k > block // 4:
            heuristics.SMALL_ROUTES, heuristics.ROUTE_BLOCK = small, block
            print(f"    prologue, one kernel up to {small} routes, blocks of {block}: {prologue(weights, point):.1f}")
    heuristics.SMALL_ROUTES, heuristics.ROUTE_BLOCK = kept
    return best


if __name__ == "__main__":
    main()
