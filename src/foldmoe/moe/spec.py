"""What one MoE layer is, in facts that a file's header can tell; and where this rank stands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING, Literal

from foldmoe.formats import blocks
from foldmoe.formats.tensor import Format
from foldmoe.moe.activation import Activation

if TYPE_CHECKING:
    from foldmoe.moe.weights import ExpertWeights

ActivationPrecision = Literal["bf16", "fp8", "fp8_token"]


@dataclass(frozen=True)
class ExpertSpec:
    """One set of experts: how many, how wide, how stored.

    Args:
        count: experts in the set, over all ranks; 1 for a shared expert.
        width: I, the intermediate width.
        format: of both projections.
        block: (rows, columns) a scale; the format's own unless a shard was regridded.
        e8m0_scales: one-byte power-of-two scales (always so for MX formats).
    """

    count: int
    width: int
    format: Format
    block: blocks.Block = (0, 0)
    e8m0_scales: bool = False

    def __post_init__(self) -> None:
        if self.block == (0, 0):
            object.__setattr__(self, "block", self.format.block)
        if self.format in (Format.MXFP4, Format.MXFP8):
            object.__setattr__(self, "e8m0_scales", True)

    @classmethod
    def of(cls, weights: ExpertWeights) -> ExpertSpec:
        down = weights.down
        return cls(weights.num_experts, weights.width, weights.format, down.block, down.e8m0_scales)

    def nbytes(self, hidden: int) -> int:
        """Stored bytes of one expert's three matrices, scales included."""
        total = 0
        for rows, columns in ((self.width, hidden), (self.width, hidden), (hidden, self.width)):
            if self.format is Format.BF16:
                total += 2 * rows * columns
                continue
            n, k = blocks.scale_shape(rows, columns, self.block)
            scale_bytes = 1 if self.e8m0_scales or self.format is Format.NVFP4 else 4
            total += (rows * columns // 2 if self.format.packed else rows * columns) + n * k * scale_bytes
            total += 4 if self.format is Format.NVFP4 else 0
        return total

    def shard(self, parts: int) -> ExpertSpec:
        """One of ``parts`` equal slices of the width; a scale block that the cut divides becomes finer.

        Raises:
            ValueError: if the width does not divide into whole bytes.
        """
        if parts == 1:
            return self
        if self.width % parts or (self.format.packed and self.width // parts % 2):
            raise ValueError(f"a width of {self.width} does not cut into {parts} equal {self.format.value} shards")
        width = self.width // parts
        block = (gcd(self.block[0], width), gcd(self.block[1], width)) if self.format.fp8 else self.block
        return replace(self, width=width, block=block)

    def __str__(self) -> str:
        scales = "" if self.format is Format.BF16 else " e8m0" if self.e8m0_scales else " f32"
        return f"{self.count}x{self.width} {self.format.value}{scales if self.format.fp8 else ''}"


@dataclass(frozen=True)
class LayerSpec:
    """One MoE layer.

    Args:
        name: as in the checkpoint, e.g. ``layers.3.ffn``; used in every message.
        hidden: H.
        top_k: routed experts a token.
        routed, shared: the two sets; ``shared`` is None where a layer has no shared expert.
        activation, shared_activation: gated activations of the two sets.
        activations: precision the checkpoint declares for x and act(.): "fp8" or "bf16".
        shared_gate: the shared expert's output is weighted by a sigmoid per token (Qwen).
        draft: an MTP or DSpark draft layer.
        notes: mismatches between config and tensors, and other facts a reader should see.
    """

    name: str
    hidden: int
    top_k: int
    routed: ExpertSpec
    shared: ExpertSpec | None = None
    activation: Activation = field(default_factory=Activation)
    shared_activation: Activation = field(default_factory=Activation)
    activations: ActivationPrecision = "bf16"
    shared_gate: bool = False
    draft: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.top_k <= self.routed.count:
            raise ValueError(f"{self.name}: top-k {self.top_k} of {self.routed.count} routed experts")


    @property
    def nbytes(self) -> int:
        """Stored bytes of all experts of both sets."""
        total = self.routed.count * self.routed.nbytes(self.hidden)
        return total + (self.shared.count * self.shared.nbytes(self.hidden) if self.shared else 0)

    def local(self, placement: Placement) -> LayerSpec:
        """The part of the layer that one rank holds: its routed experts, its slice of every width.

        Raises:
            ValueError: if a width does not cut into ``tp_size`` equal parts of whole bytes.
        """
        count = len(placement.experts(self.routed.count))
        routed = replace(self.routed.shard(placement.tp_size), count=count)
        shared = self.shared.shard(placement.tp_size) if self.shared else None
        return replace(self, routed=routed, shared=shared, top_k=min(self.top_k, count))


@dataclass(frozen=True)
class Placement:
    """Which part of the layer this rank holds.

    Experts lie in contiguous ranges over the expert-parallel ranks; where they do not divide evenly, the first ranks
    hold one more. Tensor parallelism cuts every expert's width.
    """

    ep_size: int = 1
    ep_rank: int = 0
    tp_size: int = 1
    tp_rank: int = 0

    def __post_init__(self) -> None:
        for kind, rank, size in (("ep", self.ep_rank, self.ep_size), ("tp", self.tp_rank, self.tp_size)):
            if size < 1 or not 0 <= rank < size:
                raise ValueError(f"{kind}_rank {rank} of {kind}_size {size}")

    def experts(self, count: int) -> range:
        """Global ids of the routed experts that this rank holds, of ``count`` in all."""
        share, extra = divmod(count, self.ep_size)
        start = self.ep_rank * share + min(self.ep_rank, extra)
        return range(start, start + share + (self.ep_rank < extra))
