"""What one MoE layer is, in facts that a file's header can tell; and where this rank stands."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd
from typing import TYPE_CHECKING, Literal

import torch

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
        block: elements along I that share a scale: (rows of gate and up, columns of down). The format's own unless a
            shard was regridded; along H a block is always the format's own.
        e8m0_scales: one-byte power-of-two scales (always so for MX formats).
        float_bytes: bytes of one plain float: of a value for bf16 (2), else of a scale that is no single byte (4).
        float16: plain values are float16, which only the ``torch`` backend multiplies.
    """

    count: int
    width: int
    format: Format
    block: blocks.Block = (0, 0)
    e8m0_scales: bool = False
    float_bytes: int = 0
    float16: bool = False

    def __post_init__(self) -> None:
        if self.block == (0, 0):
            object.__setattr__(self, "block", self.format.block)
        if not self.float_bytes:
            object.__setattr__(self, "float_bytes", 2 if self.format is Format.BF16 else 4)
        if self.format in (Format.MXFP4, Format.MXFP8):
            object.__setattr__(self, "e8m0_scales", True)

    @classmethod
    def of(cls, weights: ExpertWeights) -> ExpertSpec:
        gate_up, down = weights.gate_up, weights.down
        plain = down.values if down.scales is None else down.scales
        return cls(
            weights.num_experts,
            weights.width,
            weights.format,
            (gate_up.block[0], down.block[1]),
            down.e8m0_scales,
            plain.element_size() if plain.element_size() > 1 else 0,
            down.values.dtype == torch.float16,
        )

    def nbytes(self, hidden: int) -> int:
        """Stored bytes of one expert's three matrices, scales included."""
        gate = self._matrix_nbytes(self.width, hidden, (self.block[0], self.format.block[1]))
        return 2 * gate + self._matrix_nbytes(hidden, self.width, (self.format.block[0], self.block[1]))

    def _matrix_nbytes(self, rows: int, columns: int, block: blocks.Block) -> int:
        if self.format is Format.BF16:
            return self.float_bytes * rows * columns
        values = rows * columns // 2 if self.format.packed else rows * columns
        n, k = blocks.scale_shape(rows, columns, block)
        if self.format is Format.NVFP4:
            return values + n * k + 4
        return values + n * k * (1 if self.e8m0_scales else self.float_bytes)

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
        return replace(self, width=width, block=(gcd(self.block[0], width), gcd(self.block[1], width)))

    def __str__(self) -> str:
        scales = "" if self.format is Format.BF16 else " e8m0" if self.e8m0_scales else " f32"
        return f"{self.count}x{self.width} {self.format.value}{scales if self.format.fp8 else ''}"


@dataclass(frozen=True)
class LayerSpec:
    """One MoE layer.

    Args:
        name: as in the checkpoint, e.g. ``layers.3.ffn``; used in every message.
        hidden: H.
        top_k: routed experts a token; -1 where nothing tells.
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
        if not -1 <= self.top_k <= self.routed.count:
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


def in_words(spec: LayerSpec) -> str:
    """Sizes and formats in one line, which results keep and are compared by."""
    return f"H {spec.hidden}, routed {spec.routed}, shared {spec.shared}, top-{spec.top_k}"


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
                raise ValueError(f"{kind}_rank {rank} of {kind}_size {size}; expected a size >= 1, ranks from 0 up")

    def experts(self, count: int) -> range:
        """Global ids of the routed experts that this rank holds, of ``count`` in all."""
        share, extra = divmod(count, self.ep_size)
        start = self.ep_rank * share + min(self.ep_rank, extra)
        return range(start, start + share + (self.ep_rank < extra))
