"""Layers on the Triton backend for its GPU tests: a pairwise set over four pairs of widths for each pair of formats."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch

from foldmoe.backends.triton.config import token_tile
from tests.support.cases import random_case
from tests.support.pairwise import Trait, cover
from tests.triton.support import PAIRS, call_of, pack, weights

if TYPE_CHECKING:
    from foldmoe.backends.triton.layer import TritonLayer
    from foldmoe.moe import ExpertWeights

EXPERTS, TOP_K, HIDDEN = 8, 3, 512
WIDTHS = (
    ((64, 192), (288, 320), (2048, 2048), (2304, 3072)),
    ((192, 3072), (320, 2304), (2048, 64), (3072, 288)),
)
"""(routed, shared); pairs of formats take one line and the other in turn."""


class Layer(NamedTuple):
    """Formats (see ``tests.triton.support``), precision, widths."""

    pair: str
    activations: str
    widths: tuple[int, int]

    @property
    def traits(self) -> frozenset[Trait]:
        widths = {("width", width) for width in self.widths}
        return frozenset({("format", self.pair), ("activations", self.activations), *widths})

    def __str__(self) -> str:
        return f"{self.pair}-{self.activations}-{self.widths[0]}-{self.widths[1]}"


LAYERS = tuple(
    Layer(pair, ("bf16", "fp8")[(i // 2 + j) % 2], widths)
    for i, pair in enumerate(PAIRS)
    for j, widths in enumerate(WIDTHS[i % 2])
)

MAIN = tuple(
    Layer(pair, activations, (2048, 2048))
    for pair, activations in (
        ("mxfp4-fp8_e8m0", "fp8"),
        ("mxfp4-fp8_32", "fp8"),
        ("mxfp4-mxfp4", "bf16"),
        ("fp8-fp8", "fp8"),
        ("fp8_e8m0-fp8_e8m0", "bf16"),
        ("fp8_32float-bf16", "fp8"),
        ("bf16-bf16", "bf16"),
        ("mxfp8-fp8", "fp8"),
    )
)
"""Layers whose bits, streams and graphs are tested; each runs at every size of tile."""


def compiled(layer: Layer, tokens: int) -> tuple[str, str, int, int]:
    """What a batch compiles by; widths are numbers to the kernels."""
    tiles = token_tile(tokens * TOP_K // EXPERTS, 64), token_tile(tokens, 64)
    return layer.pair, layer.activations, *tiles


@cache
def pairwise() -> tuple[tuple[Layer, int, str], ...]:
    return tuple(cover({layer: layer.traits for layer in LAYERS}, compiled))


@cache
def gpu_weights(pair: str, widths: tuple[int, int]) -> tuple[ExpertWeights, ExpertWeights]:
    return weights(pair, EXPERTS, *widths, HIDDEN, device="cuda")


@cache
def gpu_layer(pair: str, activations: str, widths: tuple[int, int]) -> TritonLayer:
    return pack(*gpu_weights(pair, widths), activations)


Job = tuple[tuple[Layer, int], ...]


def jobs() -> list[Job]:
    """Layers and batch sizes, one job for each pair of formats and precision."""
    found: dict[tuple[str, str], dict[tuple[Layer, int], None]] = {}
    batches = [(layer, tokens) for layer, tokens, _ in pairwise() if tokens]
    for layer, tokens in (*batches, *product(MAIN, (1, 17, 33, 64, 129, 1000))):
        found.setdefault((layer.pair, layer.activations), {})[layer, tokens] = None
    return [tuple(job) for job in found.values()]


def warm(job: Job) -> None:
    """Fill Triton's cache on disk; runs in a process of its own."""
    for layer, tokens in job:
        case = random_case(tokens, TOP_K, EXPERTS, HIDDEN).to("cuda")
        for folded in (True, False):
            gpu_layer(*layer).forward(call_of(case), folded=folded)
    torch.cuda.synchronize()
