"""Which shape of the launches runs a batch: one frozen config, chosen by one function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foldmoe.backends.triton.layout import FOLDED_SCALE

if TYPE_CHECKING:
    from foldmoe.backends.triton.layout import Experts, Matrix

UP_ROWS = 128
"""Hidden columns of an up tile: exactly one quantisation group."""

ONE_PROGRAM_ROUTES = 2048
"""Up to here one program sorts all routes in the prepare launch; above, sorting takes two launches more."""


@dataclass(frozen=True)
class GemmConfig:
    """One grouped GEMM.

    Args:
        rows: weight rows of a tile.
        routed_tokens, shared_tokens: tokens of a tile.
        warps, stages: as Triton takes them.
    """

    rows: int
    routed_tokens: int
    shared_tokens: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TritonConfig:
    """All launches of one batch. No field changes the order in which anything is summed."""

    up: GemmConfig
    down: GemmConfig
    combine_columns: int = 1024


@dataclass(frozen=True)
class Machine:
    """What the choice depends on.

    Args:
        shared_memory: bytes one program may take.
        most_tokens: largest token tile. 64: with 128 an up tile's two accumulators and its rounding spill registers. 32
            on data-centre Blackwell, where Triton 3.6 gives every dot of a step its own piece of tensor memory.
        most_stages: depth of the software pipeline; AMD's wants two.
    """

    shared_memory: int
    most_tokens: int = 64
    most_stages: int = 4


MACHINES = {
    "sm_80": Machine(166912),
    "sm_90": Machine(232448),
    "sm_100": Machine(232448, most_tokens=32),
    "gfx942": Machine(65536, most_stages=2),
    "gfx950": Machine(163840, most_stages=2),
}
"""GPUs that kernels are compiled for ahead, by architecture."""


def token_tile(rows: int, most: int) -> int:
    """Tokens of a tile for ``rows`` tokens an expert: 16, 32, .. up to ``most``."""
    tile = 16
    while tile < min(rows, most):
        tile *= 2
    return tile


def choose(
    routed: Experts | None,
    shared: Experts | None,
    tokens: int,
    routes_per_row: float,
    machine: Machine,
    *,
    together: bool,
) -> TritonConfig:
    """The config for a batch: a routed tile covers the mean tokens of an expert, a shared tile the batch.

    Args:
        together: both sets are tiles of one grid. Shared tiles are as large as routed ones then: all programs have
            the registers of the larger kind, and on Hopper a shared up tile of 32 tokens takes 179 where a routed one
            of 16 takes 121, so that one program would fit an SM in place of two.
    """
    mean = int(tokens * routes_per_row / max(routed.count, 1)) if routed is not None else 0
    rows = 64 if tokens <= 128 else 128
    ups = [experts.gate_up if experts else None for experts in (routed, shared)]
    downs = [experts.down if experts else None for experts in (routed, shared)]
    most = machine.most_tokens
    while True:  # until two stages fit in shared memory
        routed_tile = token_tile(mean, most)
        shared_tile = routed_tile if together else token_tile(tokens, most)
        up = _gemm(ups, UP_ROWS, 2, (routed_tile, shared_tile), machine)
        down = _gemm(downs, rows, 1, (routed_tile, shared_tile), machine)
        if min(up.stages, down.stages) >= 2 or most <= 16:
            return TritonConfig(up, down)
        most //= 2


def _gemm(sets: list[Matrix | None], rows: int, matrices: int, tiles: tuple[int, int], machine: Machine) -> GemmConfig:
    """Eight warps where a tile has 128 rows (two of Hopper's warpgroups); as many stages as shared memory holds."""
    pairs = zip(sets, tiles, strict=True)
    need = max((_stage_bytes(matrix, rows * matrices, tile) for matrix, tile in pairs if matrix), default=1)
    stages = max(1, min(machine.most_stages, machine.shared_memory // need))
    return GemmConfig(rows, *tiles, 8 if rows >= 128 else 4, stages)


def _stage_bytes(matrix: Matrix, rows: int, tokens: int) -> int:
    weights = rows * matrix.step * matrix.bits // 8
    scales = rows * max(1, matrix.step // matrix.block[1]) if matrix.scale == FOLDED_SCALE else 0
    return weights + scales + 2 * tokens * matrix.step
