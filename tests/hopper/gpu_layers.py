"""Layers on the Hopper backend for its GPU tests: shapes, batches, and what has to be compiled for them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from foldmoe.backends.hopper import heuristics
from foldmoe.layer import FoldedMoE
from foldmoe.moe import Activation, ExpertWeights
from foldmoe.planner import FusionPolicy
from foldmoe.runtime import workspace
from tests.support.cases import BF16_TOLERANCE, CASE_NAMES, Case, get_case
from tests.triton.support import LIMIT, weights

if TYPE_CHECKING:
    from collections.abc import Iterator

EXPERTS, TOP_K = 8, 3
TOKENS = (0, 1, 2, 3, 7, 8, 17, 64, 65, 129, 1000, 8192)


@dataclass(frozen=True)
class Shape:
    """A layer: pair of formats (see ``tests.triton.support``), hidden size, widths (shared 0 for none), precision."""

    pair: str
    hidden: int
    width: int
    shared_width: int
    activations: str = "fp8"

    def tolerance(self, tokens: int) -> float:
        """Between promotions the FP8 tensor cores keep about 13 bits, so about one hidden value in a hundred rounds
        to the E4M3 value beside the oracle's. In short sums and few rows this reached 9.0e-3 on an H200 (hidden size
        512; 7.1e-3 at 1024 and two rows, 6.5e-3 at 17); at V4-Flash's sizes 2.7e-3 to 3.9e-3. Sums over all of K, for
        tokens with one scale, lose more.
        """
        if self.activations == "bf16":
            return BF16_TOLERANCE
        if self.activations == "fp8_token":
            return 1.5e-2
        long = min(self.hidden, self.width, self.shared_width or self.width) >= 1024
        return 6e-3 if long and tokens > 64 else 1e-2

    @property
    def geometry(self) -> heuristics.Geometry:
        """As far as it decides tiles."""
        routed, shared = self.pair.split("-")
        kind, groups = ("fp8", 4 if "32" in routed else 1) if routed.startswith("fp8") else (routed, 0)
        shared_groups = 0 if shared == "bf16" else 4 if "32" in shared else 1
        return heuristics.Geometry(
            self.hidden, 1, 1, 1, 1, 2, 2, shared_groups, LIMIT, LIMIT, self.activations == "fp8_token", kind, groups
        )

    def __str__(self) -> str:
        scales = "-token" if self.activations == "fp8_token" else ""
        return f"{self.pair.removeprefix('mxfp4-')}-{self.hidden}-{self.width}-{self.shared_width}{scales}"


FLOAT = Shape("mxfp4-fp8", 512, 192, 320)
WIDE = Shape("mxfp4-fp8_e8m0", 1024, 2048, 2048)
FINE = Shape("mxfp4-fp8_32", 640, 320, 2304)
TOKEN = Shape("mxfp4-fp8", 1152, 2048, 320, "fp8_token")
FP8 = Shape("fp8-fp8", 1024, 2048, 2048)
FINE_FP8 = Shape("fp8_32-fp8_32", 1280, 2304, 3072)
BF16 = Shape("bf16-bf16", 1024, 2048, 2304, "bf16")
SHAPES = {
    FLOAT: TOKENS,
    WIDE: (*TOKENS, 200),
    FINE: (*TOKENS, 200),
    TOKEN: TOKENS,
    Shape("mxfp4-fp8", 1024, 3072, 192): (1, 17, 1000),
    Shape("mxfp4-fp8_32", 1280, 2304, 3072): (2, 64, 8192),
    Shape("mxfp4-fp8", 384, 288, 0): (3, 65, 1000),
    FP8: TOKENS,
    Shape("fp8_e8m0-fp8_e8m0", 512, 192, 320): (1, 7, 64, 129, 1000, 8192),
    FINE_FP8: (2, 17, 65, 1000, 8192),
    Shape("fp8_32-fp8", 640, 64, 288): (3, 129, 1000),
    Shape("fp8-fp8_32", 256, 3072, 64): (8, 64, 1000),
    Shape("fp8-fp8", 384, 288, 0): (3, 65, 1000),
    BF16: TOKENS,
    Shape("bf16-bf16", 512, 192, 320, "bf16"): (1, 7, 64, 129, 1000, 8192),
    Shape("bf16-bf16", 384, 288, 0, "bf16"): (3, 65, 1000),
}


def pairwise() -> Iterator[tuple[Shape, int, str]]:
    """The six main shapes meet every batch size, the others one of each kind of tile; routings take turns."""
    routings = [name for name in CASE_NAMES if name != "no_tokens"]
    n = 0
    for shape, sizes in SHAPES.items():
        for tokens in sizes:
            yield shape, tokens, routings[n % len(routings)]
            n += 1


def case_of(shape: Shape, tokens: int, routing: str) -> Case:
    dtype = torch.int32 if tokens % 2 else torch.int64
    return get_case(routing, tokens, TOP_K, EXPERTS, shape.hidden, id_dtype=dtype).to("cuda")


@cache
def gpu_weights(shape: Shape) -> tuple[ExpertWeights, ExpertWeights | None]:
    width = shape.shared_width or 32
    routed, shared = weights(shape.pair, EXPERTS, shape.width, width, shape.hidden, device="cuda")
    return routed, shared if shape.shared_width else None


def make(
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    fold: str = "auto",
    activations: str = "checkpoint",
    clamp: float | None = None,
) -> FoldedMoE:
    """A layer on the Hopper backend or an error; routed experts are clamped, the shared expert is where ``clamp`` is.

    Equal clamps let FP8 and bf16 experts share a K loop.
    """
    policy = FusionPolicy(backend="hopper", fold=fold, activations=activations)  # type: ignore[arg-type]
    return FoldedMoE(routed, shared, activation=Activation(LIMIT), shared_activation=Activation(clamp), policy=policy)


@cache
def gpu_layer(shape: Shape, fold: str = "auto") -> FoldedMoE:
    return make(*gpu_weights(shape), fold, shape.activations)


def run(layer: FoldedMoE, case: Case) -> torch.Tensor:
    return layer(*case.args, **case.kwargs)


def warm(job: tuple[Shape, str, tuple[tuple[int, str], ...]]) -> None:
    """Fill Triton's cache on disk; runs in a process of its own."""
    shape, fold, batches = job
    layer = gpu_layer(shape, fold)
    for tokens, routing in batches:
        run(layer, case_of(shape, tokens, routing))
    torch.cuda.synchronize()


def jobs() -> list[tuple[Shape, str, tuple[tuple[int, str], ...]]]:
    """One for every compiled launch."""
    found: dict[tuple[Shape, int, int, int], list[tuple[int, str]]] = {}
    for shape, tokens, routing in pairwise():
        top_k = 0 if routing == "top_0" else TOP_K
        config = heuristics.choose(shape.geometry, tokens, top_k, EXPERTS)
        if tokens:
            key = (shape, config.tokens, config.between, config.shared_tokens)
            found.setdefault(key, []).append((tokens, routing))
    dual = [(shape, "dual", ((64, "random"),)) for shape in (WIDE, FP8, BF16)]
    return [(key[0], "auto", tuple(batches)) for key, batches in found.items()] + dual


def poison() -> None:
    """NaN in the scratch memory that the next call takes, and in memory that its output may get."""
    for held in workspace._held.values():
        held.memory.fill_(255)
    torch.full((2**24,), torch.nan, device="cuda")
