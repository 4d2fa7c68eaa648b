"""Which shape of the launch runs a batch: one frozen config, chosen by one function."""

from __future__ import annotations

from dataclasses import dataclass

_SHARED_MEMORY = 232448 - 2048
"""Bytes a CTA may take on Hopper, less what the compiler adds for its own exchanges."""

SMALL_ROUTES = 2048
"""Up to here the prologue is one kernel: a token's program reads all ids."""

ROUTE_BLOCK = 512
"""Routes that a block of a larger batch's prologue counts, less what would cut a token's routes."""

_WIDEST_FINE = 64
"""Columns of a shared tile with four scales a K step; 128 would spill 2.9 kB a thread, inside the K loop."""


@dataclass(frozen=True)
class Geometry:
    """The layer as the kernel sees it: blocks of 256 packed rows and steps of 128 columns.

    Args:
        hidden: H.
        up4, down4: row blocks of a routed expert's two projections.
        up8, down8: the same for the shared expert; 0 where there is none.
        k_down4, k_down8: K steps of the down projections (the up projections have ``hidden / 128``).
        scale_groups: shared-expert scales a K step and row: 1 (128 columns) or 4 (32 columns); 0 without one.
        limit4, limit8: activation limits; infinite for none.
        token_scales: x has one scale a token: routed up projections are summed over all of K in the tensor core.
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

    @property
    def k_up(self) -> int:
        """K steps of both up projections."""
        return self.hidden // 128

    @property
    def h_stride(self) -> int:
        """Columns of the hidden buffer, shared by both sets."""
        return 128 * max(self.k_down4, self.k_down8)


@dataclass(frozen=True)
class HopperConfig:
    """One launch. Every distinct value is one compiled kernel.

    Args:
        geometry: the layer.
        tokens: columns of a routed token tile (8 .. 128).
        tail: columns of the products of a tile with so few rows; 0 where that saves nothing.
        shared_tokens: columns of a shared token tile.
        warpgroups: consumer warpgroups: 4 with small token tiles, 2 with large ones.
        stages: slots of the ring.
        registers: a consumer thread's registers.
    """

    geometry: Geometry
    tokens: int
    tail: int
    shared_tokens: int
    warpgroups: int
    stages: int
    registers: int

    @property
    def units(self) -> int:
        """64-row units of a 256-row block that one warpgroup multiplies: in one pass over K (routed), or in as many
        passes (shared: FP8 rows are twice as wide in the ring).
        """
        return 4 // self.warpgroups

    @property
    def columns(self) -> int:
        """Columns of one routed product; a wider tile's are multiplied in two groups."""
        return min(self.tokens, 64)

    @property
    def routed_steps(self) -> tuple[int, int]:
        """K steps of a routed tile, up and down; even where a turn of the loop takes two."""
        pair = 2 if self.units == 1 else 1
        up_pair = 2 if self.geometry.token_scales else pair
        up, down = self.geometry.k_up, self.geometry.k_down4
        return -(-up // up_pair) * up_pair, -(-down // pair) * pair

    @property
    def launch_registers(self) -> int:
        """Registers a thread at launch, before the warpgroups trade theirs."""
        return 96 if self.warpgroups == 4 else 168

    def describe(self) -> str:
        """One line for people (``str`` is the compiled kernel's cache key and names every field)."""
        tail = f" ({self.tail})" if self.tail else ""
        return (
            f"tokens {self.tokens}{tail}/{self.shared_tokens}, {self.warpgroups} warpgroups x {self.registers} "
            f"registers, {self.stages} stages"
        )


def slot_bytes(tokens: int, shared_tokens: int, warpgroups: int) -> int:
    """Shared memory of one ring slot."""
    widest = max(tokens, shared_tokens)
    scales = 4 * (max(tokens, 32) + max(shared_tokens, 32))
    return warpgroups * 8192 + 4 * 256 + widest * 128 + scales


def fixed_bytes(tokens: int, shared_tokens: int, warpgroups: int) -> int:
    """Shared memory beside the ring: exchanges between warpgroups, the first half of an up tile."""
    widest = max(tokens, shared_tokens)
    amax = 2 * warpgroups * 4 * (tokens + shared_tokens)
    first_half = 2 * 32 * 4 * widest if warpgroups == 2 else 0
    return amax + first_half + warpgroups * 32 * widest + 1024


def build(geometry: Geometry, tokens: int, shared_tokens: int, warpgroups: int) -> HopperConfig:
    """A config with as many stages as fit."""
    room = _SHARED_MEMORY - fixed_bytes(tokens, shared_tokens, warpgroups)
    stages = min(8, room // slot_bytes(tokens, shared_tokens, warpgroups))
    small = warpgroups == 4
    tail = tokens // 2 if tokens >= 64 else 0
    return HopperConfig(geometry, tokens, tail, shared_tokens, warpgroups, stages, 112 if small else 232)


def choose(geometry: Geometry, rows: int, routes_per_row: float, experts: int) -> HopperConfig:
    """The config for a batch of ``rows`` tokens on this rank, from what the host knows without asking the device."""
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
        tokens = 128
    if tokens <= 16:
        shared = 8 if rows <= 8 else 16 if rows <= 16 else 32
        return build(geometry, tokens, shared, 4)
    shared = max(tokens, 32 if rows <= 32 else 64 if rows <= 64 else 128)
    if geometry.scale_groups == 4:
        shared = min(shared, _WIDEST_FINE)
    return build(geometry, tokens, shared, 2)
