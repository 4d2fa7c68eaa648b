"""Which shape of the launch runs a batch: one frozen config, chosen by one function."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_SHARED_MEMORY = 232448 - 2048
"""Bytes a CTA may take on Hopper, less what the compiler adds for its own exchanges."""

SMALL_ROUTES = 2048
"""Up to here the prologue is one kernel: a token's program reads all ids."""

ROUTE_BLOCK = 512
"""Routes that a block of a larger batch's prologue counts, less what would cut a token's routes."""

_BETWEEN, _FEW = 96, 104
"""In tiles of 128, columns of a third kind of product, for tiles with no more rows; and up to how many routes an expert
there is one: at 72 it saved 13 to 15 % (H200, V4-Flash), and it is a third more code to fetch.
"""

PARTS, CUT_TILES = 8, 16
"""Where a launch has at most so many up tiles, their K is cut into up to so many parts, each a CTA's (``cut.py``). With
14 (a token on one of eight ranks that share the width of V4-Flash's experts) it saved 23 % on an H200; with 26 it took
5 % longer and with about 40 1 to 6 %: keeping products and adding them up costs more than the SMs that would be idle.
With 28 of one token it saved 3 and 7 %, but two streams took up to 20 % longer.
"""

_WIDEST_FINE = 64
"""Columns of an FP8 tile with four scales a K step; 128 would spill 2.9 kB a thread, inside the K loop."""


@dataclass(frozen=True)
class Geometry:
    """The layer as the kernel sees it: blocks of 256 packed rows and steps of 128 columns (64 of bf16).

    Args:
        hidden: H.
        up4, down4: row blocks of a routed expert's two projections.
        up8, down8: the same for the shared expert; 0 where there is none.
        k_down4, k_down8: K steps of the down projections (the up projections have ``hidden / 128``).
        scale_groups: shared-expert scales a K step and row: 1 (128 columns) or 4 (32 columns); 0 without one.
        limit4, limit8: activation limits; infinite for none.
        token_scales: x has one scale a token: routed up projections are summed over all of K in the tensor core.
        routed: how routed weights are stored: "mxfp4", "fp8" or "bf16"; the shared expert's are bf16 beside bf16, else
            FP8.
        routed_groups: scales a K step and row of routed FP8 weights, as ``scale_groups``; 0 for others.

    Names that end in 4 are the routed experts', those in 8 the shared expert's, whatever their formats.
    """

    hidden: int
    up4: int
    down4: int
    up8: int
    down8: int
    k_down4: int
    k_down8: int
    scale_groups: int
    limit4: float
    limit8: float
    token_scales: bool = False
    routed: str = "mxfp4"
    routed_groups: int = 0

    @property
    def k_up(self) -> int:
        """K steps of both up projections."""
        return self.hidden // self.step

    @property
    def step(self) -> int:
        """Columns of a K step: 128 bytes of tokens."""
        return 64 if self.routed == "bf16" else 128

    @property
    def quantised(self) -> bool:
        """Whether tokens and hidden vectors are E4M3 with scales; bf16 otherwise."""
        return self.routed != "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """Of tokens and hidden vectors."""
        return torch.float8_e4m3fn if self.quantised else torch.bfloat16

    @property
    def permuted(self) -> bool:
        """Whether routed tokens and hidden vectors are stored in the order of ``pack.column_order``."""
        return self.routed == "mxfp4"

    @property
    def whole(self) -> bool:
        """Whether weights are multiplied as they lie: a slot of the ring holds 256 rows of either set."""
        return self.routed != "mxfp4"

    @property
    def h_stride(self) -> int:
        """Columns of the hidden buffer, shared by both sets."""
        return self.step * max(self.k_down4, self.k_down8)


@dataclass(frozen=True)
class HopperConfig:
    """One launch. Every distinct value is one compiled kernel.

    Args:
        geometry: the layer.
        tokens: columns of a routed token tile (8 .. 128).
        tail: columns of the products of a tile with so few rows; 0 where that saves nothing.
        between: the same for tiles with more rows than ``tail`` and no more than this; 0 for none.
        shared_tokens: columns of a shared token tile.
        warpgroups: consumer warpgroups: 4 with small token tiles, 2 with large ones.
        stages: slots of the ring.
        registers: a consumer thread's registers.
        parts: the most that an up tile's K is cut into; 1: none is cut.
    """

    geometry: Geometry
    tokens: int
    tail: int
    between: int
    shared_tokens: int
    warpgroups: int
    stages: int
    registers: int
    parts: int = 1

    @property
    def units(self) -> int:
        """64-row units of a 256-row block that one warpgroup multiplies: in one pass over K (routed), or in as many
        passes (shared: FP8 rows are twice as wide in the ring).
        """
        return 4 // self.warpgroups

    @property
    def routed_steps(self) -> tuple[int, int]:
        """K steps of a routed tile, up and down; even where a turn of the loop takes two."""
        g = self.geometry
        pair = 2 if self.units == 1 and not g.whole else 1
        up_pair = 2 if g.token_scales and not g.whole else pair
        return -(-g.k_up // up_pair) * up_pair, -(-g.k_down4 // pair) * pair

    @property
    def passes(self) -> int:
        """Passes over K that 256 rows of the shared expert take."""
        return 1 if self.geometry.whole else self.units

    @property
    def one_loop(self) -> bool:
        """Whether one K loop serves both sets: less code to fetch."""
        g = self.geometry
        alike = g.whole and g.routed_groups == g.scale_groups and g.limit4 == g.limit8
        return alike and g.up8 > 0 and self.tokens == self.shared_tokens

    @property
    def two_loops(self) -> bool:
        """Whether there is a shared expert with a K loop of its own."""
        return self.geometry.up8 > 0 and not self.one_loop

    @property
    def launch_registers(self) -> int:
        """Registers a thread at launch, before the warpgroups trade theirs."""
        return 96 if self.warpgroups == 4 else 168

    def describe(self) -> str:
        """One line for people (``str`` is the compiled kernel's cache key and names every field)."""
        fewer = ", ".join(str(columns) for columns in (self.tail, self.between) if columns)
        tail = f" ({fewer})" if fewer else ""
        parts = f", K in up to {self.parts} parts" if self.parts > 1 else ""
        return (
            f"tokens {self.tokens}{tail}/{self.shared_tokens}, {self.warpgroups} warpgroups x {self.registers} "
            f"registers, {self.stages} stages{parts}"
        )


def slot_bytes(tokens: int, shared_tokens: int, warpgroups: int) -> int:
    """Shared memory of one ring slot."""
    widest = max(tokens, shared_tokens)
    scales = 4 * (max(tokens, 32) + max(shared_tokens, 32))
    return warpgroups * 8192 + 4 * 256 + widest * 128 + scales


def fixed_bytes(tokens: int, shared_tokens: int, warpgroups: int, item: int = 0) -> int:
    """Shared memory beside the ring: exchanges between warpgroups, the first half of an up tile.

    ``item``: bytes of a hidden value where no half is kept, that is, with whole weights.
    """
    widest = max(tokens, shared_tokens)
    amax = 2 * warpgroups * 4 * (tokens + shared_tokens)
    first_half = 2 * 32 * 4 * widest if warpgroups == 2 and item == 0 else 0
    return amax + first_half + warpgroups * 32 * max(item, 1) * widest + 1024


def build(
    geometry: Geometry, tokens: int, shared_tokens: int, warpgroups: int, between: int = 0, parts: int = 1
) -> HopperConfig:
    """A config with as many stages as fit."""
    item = geometry.dtype.itemsize if geometry.whole else 0
    room = _SHARED_MEMORY - fixed_bytes(tokens, shared_tokens, warpgroups, item)
    stages = min(8, room // slot_bytes(tokens, shared_tokens, 4 if geometry.whole else warpgroups))
    registers = 112 if warpgroups == 4 else 232
    tail = tokens // 2 if tokens >= 64 else 0
    return HopperConfig(geometry, tokens, tail, between, shared_tokens, warpgroups, stages, registers, parts)


def _cuts(geometry: Geometry) -> bool:
    """Whether K can be cut. With one scale a token the tensor core sums over all of K; four products a step, as scales
    of 32 columns make, would be four times as much to keep; loops over FP8 and bf16 routed experts keep none.
    """
    return geometry.routed == "mxfp4" and not geometry.token_scales and geometry.scale_groups < 4


def choose(geometry: Geometry, rows: int, routes_per_row: float, experts: int, powers: bool = False) -> HopperConfig:
    """The config for a batch, from what the host knows without asking the device.

    Args:
        rows: tokens, or the most that any rank has (``Call.sized_for``).
        routes_per_row: that this rank's experts expect. experts: that it holds.
        powers: all scales are powers of two, so that products may be kept with them (``cut.py``).
    """
    per_expert = rows * routes_per_row / max(1, experts)
    if per_expert <= 4:
        tokens = 8
    elif per_expert <= 12:
        tokens = 16
    elif per_expert <= 24:
        tokens = 32
    elif per_expert <= 56:
        tokens = 64
    else:
        tokens = 64 if geometry.routed_groups == 4 else 128
    # Every shared tile reads its weights again: with many tokens, few of them an expert's, wide ones save the most.
    crowd = rows > 64 and not geometry.whole
    if tokens == 8 or (tokens == 16 and not crowd):
        shared = 8 if rows <= 8 else 16 if rows <= 16 else 64 if crowd and geometry.scale_groups == 1 else 32
        up_tiles = min(experts, rows * routes_per_row) * geometry.up4 + geometry.up8
        few = powers and tokens == shared == 8 and up_tiles <= CUT_TILES and _cuts(geometry)
        return build(geometry, tokens, shared, 4, parts=PARTS if few else 1)
    shared = max(tokens, 32 if rows <= 32 else 64 if rows <= 64 else 128)
    if geometry.whole:
        shared = min(shared, max(tokens, 64))  # one K loop for both sets
    if geometry.scale_groups == 4:
        shared = min(shared, _WIDEST_FINE)
    narrowed = tokens == 128 and per_expert <= _FEW and not geometry.whole and not geometry.token_scales
    return build(geometry, tokens, shared, 2, between=_BETWEEN if narrowed else 0)
