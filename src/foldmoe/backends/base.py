"""What a backend is.

A backend says what it can run (``supports``), turns stored weights into its own layout and back (``pack`` and
``unpack``), and runs a packed layer. The planner asks the first question, the front door the rest.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from foldmoe.moe.slots import local_ids
from foldmoe.planner import capability
from foldmoe.runtime.streams import beside, side_stream

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.moe import Activation, ExpertWeights, LayerSpec
    from foldmoe.moe.spec import ActivationPrecision
    from foldmoe.planner.devices import Device
    from foldmoe.planner.plan import LayerPlan, Rows


@dataclass(frozen=True)
class Call:
    """One forward call, checked by the front door: every backend gets the same clean arguments.

    Args:
        x: ``[M, H]`` bf16, fp16 or float32, contiguous.
        topk_ids: ``[M, K]`` int32 or int64 local expert ids; -1 (or anything else outside 0 .. E-1) is no route.
        topk_weights: ``[M, K]`` float32.
        shared_weights: ``[M]`` float32, or None for 1.
        routed_scale: multiplies the routed sum.
        num_valid_tokens: int, or an int32 tensor of one element on x's device; rows from there on are padding.
        shared_rows: (start, end) rows that get the shared part, ints or an int32 tensor ``[2]``; None for all.
        most_rows: rows that kernels and tiles are chosen for where other ranks must choose the same, whatever reached
            them; None: x's.
    """

    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    shared_weights: Tensor | None = None
    routed_scale: float = 1.0
    num_valid_tokens: int | Tensor | None = None
    shared_rows: tuple[int, int] | Tensor | None = None
    most_rows: int | None = None

    @property
    def sized_for(self) -> int:
        """Rows that kernels and tiles are chosen for, M or more. They change no bits."""
        return max(self.x.shape[0], self.most_rows or 0)


class Unsupported(ValueError):  # noqa: N818
    """Weights that a backend's layout cannot express exactly, seen on packing; another backend may run the layer.

    Nothing has been written over by then, ``consume`` or not.
    """


class PackedLayer(ABC):
    """A layer in a backend's own layout."""

    route_share: float = 1.0
    """Share of a call's routes that this rank's experts expect: a hint to choose tiles by, set by the front door under
    expert parallelism, where most ids are -1. It changes no bits."""

    _strays: Tensor | None = None
    """``[1]`` int64 on the layer's device: ids out of range so far."""

    @abstractmethod
    def forward(self, call: Call, *, folded: bool) -> Tensor:
        """Run the layer.

        Args:
            call: checked arguments.
            folded: routed and shared in one launch; otherwise the shared part runs after the routed experts over the
                same packed weights.

        Returns:
            ``[M, H]`` in x's dtype.
        """

    @abstractmethod
    def forward_shared(self, call: Call) -> Tensor:
        """The shared part alone, ``[M, H]`` float32 (rows that do not get it are zero); for a second stream."""

    def forward_routed(self, call: Call) -> Tensor:
        """The routed part alone, ``[M, H]`` float32. Unless overridden that is :meth:`forward` of a float32 x, which no
        output dtype rounds.
        """
        return self.forward(replace(call, x=call.x.to(torch.float32), shared_rows=(0, 0)), folded=False)

    def forward_dual(self, call: Call, stream: torch.cuda.Stream | None) -> Tensor:
        """Routed experts on the current stream, the shared expert on ``stream``, then an add: what engines do unfolded.

        Args:
            call: checked arguments.
            stream: None runs the same kernels one after the other: where they are only compiled, there are no streams.

        Returns:
            ``[M, H]`` in x's dtype.
        """
        if stream is None:
            shared = self.forward_shared(call)
            return (self.forward_routed(call) + shared).to(call.x.dtype)
        main = torch.cuda.current_stream(call.x.device)
        with beside(main, stream):
            with torch.cuda.stream(stream):
                shared = self.forward_shared(call)
            routed = self.forward_routed(call)
        shared.record_stream(main)
        return (routed + shared).to(call.x.dtype)

    def rank_routes(self, call: Call, experts: range, count: int, *, slot: bool) -> Call:
        """A call over all ranks' experts as that of one rank.

        Args:
            call: ids ``[M, K]`` among ``count``.
            experts: those that this layer holds.
            slot: the shared expert is the layer's last expert: one more route, of weight 1 (or s), never scaled by
                ``routed_scale``.

        Returns:
            The same call with ids ``[M, K + slot]`` among this layer's, -1 for all others. Outside of padding, those
            outside -1 .. count - 1 are counted for :meth:`stats`.
        """
        if len(experts) == count and not slot:
            return call
        return self._rank_routes(call, experts, count, slot)

    def _rank_routes(self, call: Call, experts: range, count: int, slot: bool) -> Call:
        self._note_strays(strays(call, count))
        return own_routes(call, experts, slot)

    def _note_strays(self, found: Tensor) -> None:
        if self._strays is None:
            with torch.inference_mode(False):  # else calls outside of inference mode could not add to it
                self._strays = torch.zeros(1, dtype=torch.int64, device=found.device)
        self._strays += found

    @abstractmethod
    def unpack(self) -> tuple[ExpertWeights, ExpertWeights | None]:
        """The stored weights, bit for bit."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held by the packed weights."""

    @property
    def workspace_nbytes(self) -> int:
        """Bytes of scratch held between calls, shared by all layers on the same stream."""
        return 0

    def stats(self) -> dict[str, object]:
        """Counters and facts for people: ids that were out of range, the config last chosen, tuned-table hits."""
        return {} if self._strays is None else {"ids_out_of_range": int(self._strays.item())}


def strays(call: Call, count: int) -> Tensor:
    """How many ids, outside of padding, are neither -1 nor one of ``count`` experts: int64, on the device."""
    wrong = (call.topk_ids < -1) | (call.topk_ids >= count)
    if call.num_valid_tokens is not None:
        wrong &= torch.arange(len(wrong), device=wrong.device)[:, None] < call.num_valid_tokens
    return wrong.sum()


def own_routes(call: Call, experts: range, slot: bool) -> Call:
    """:meth:`PackedLayer.rank_routes` as a torch expression, without its counter."""
    held = len(experts)
    ids = local_ids(call.topk_ids, (experts.start, held), 1)
    if not slot:
        return replace(call, topk_ids=ids)
    tokens, device = ids.shape[0], ids.device
    row = torch.arange(tokens, device=device)
    gets = torch.ones(tokens, dtype=torch.bool, device=device)
    if call.shared_rows is not None:
        gets = (row >= call.shared_rows[0]) & (row < call.shared_rows[1])
    shared = torch.where(gets, held, -1).to(ids.dtype)
    ones = call.topk_weights.new_ones(tokens) if call.shared_weights is None else call.shared_weights
    return replace(
        call,
        topk_ids=torch.cat((ids, shared[:, None]), dim=1),
        topk_weights=torch.cat((call.topk_weights * call.routed_scale, ones[:, None]), dim=1),
        shared_weights=None,
        routed_scale=1.0,
        shared_rows=None,
    )


def run_planned(layer: PackedLayer, plan: LayerPlan, call: Call, rows: int) -> Tensor:
    """``call`` in the arm that its layer's plan has for a batch of ``rows`` tokens."""
    if plan.strategy == "slot" or plan.folds_at(rows):
        return layer.forward(call, folded=True)
    if plan.arm == "serial" or call.x.device.type not in ("cuda", "meta"):
        return layer.forward(call, folded=False)
    return layer.forward_dual(call, None if call.x.is_meta else side_stream(call.x.device))


class Backend(ABC):
    """One way to run layers."""

    name: ClassVar[str]
    deterministic: ClassVar[bool]
    """The same token gives the same bits whatever else is in the batch, run after run."""

    @abstractmethod
    def unavailable(self, device: Device) -> str | None:
        """Why this backend cannot run on ``device`` at all, or None."""

    @abstractmethod
    def supports(self, spec: LayerSpec, activations: ActivationPrecision) -> tuple[str, ...]:
        """Why this backend cannot run ``spec`` natively folded, as stored; empty if it can."""

    def packed_nbytes(self, spec: LayerSpec) -> int:
        """Bytes that the packed weights of ``spec`` (one rank's part) take; the stored bytes unless overridden."""
        return spec.nbytes

    def outline(self, spec: LayerSpec, activations: ActivationPrecision, device: Device) -> PackedLayer | None:
        """What ``spec`` (one rank's part) would pack to, without memory: meta tensors whose launches can be compiled.

        None where nothing is ever compiled, as unless overridden.

        Raises:
            ValueError: too little is known of ``device`` to choose what would run there.
        """
        return None

    def tiles(self, spec: LayerSpec, device: Device) -> str:
        """How launches choose their tiles, one line for the plan; empty where there is nothing to say."""
        return ""

    def fold_rows(self, spec: LayerSpec, device: Device) -> tuple[Rows, ...]:
        """Ranges of token counts where folding measured faster than two streams; everywhere unless overridden.

        ``spec`` is the part of the rank with the most experts, so that all ranks fold alike.
        """
        return ((0, None),)

    @abstractmethod
    def pack(
        self,
        routed: ExpertWeights,
        shared: ExpertWeights | None,
        *,
        activation: Activation,
        shared_activation: Activation,
        activations: ActivationPrecision,
        consume: bool = False,
    ) -> PackedLayer:
        """Stored weights to this backend's layout.

        Args:
            routed, shared: weights as stored, on the device that will run them.
            consume: the backend may reuse the given storage for its own layout; the caller must not touch it again.

        Raises:
            Unsupported: for weights that ``supports`` could not judge from a header (a span of scales, say).
            ValueError: for weights that no backend should run (a NaN scale).
        """


def get(name: str) -> Backend:
    """A registered backend by name.

    Raises:
        ValueError: naming the ones there are.
    """
    found = capability.find(name)
    assert isinstance(found, Backend)
    return found
