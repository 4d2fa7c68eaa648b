"""Host side of one layer: prologue, the folded launch, combine. No synchronisation; fit for CUDA-graph capture."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import triton

from foldmoe.backends.hopper import descriptors, heuristics, tuned, workspace
from foldmoe.backends.hopper.batch import BOTH, ROUTED, SHARED, Weights, bounds, cut
from foldmoe.backends.hopper.kernels import prologue
from foldmoe.backends.hopper.kernels.combine import combine
from foldmoe.backends.hopper.kernels.folded import folded_moe
from foldmoe.backends.triton.launch import launch
from foldmoe.runtime.kernels import Variant, start
from foldmoe.runtime.streams import beside

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.backends.base import Call
    from foldmoe.backends.hopper.heuristics import HopperConfig
    from foldmoe.backends.hopper.tuned import Choice

MAX_TOKENS = 16384
"""Tokens a launch: beyond, a batch is cut, which changes no bits and bounds the workspace."""

_WARPS = 4

_CHUNK = 8192
"""Counters that the second step of a large batch's prologue holds at once."""


@dataclass
class Step:
    """One call of at most :data:`MAX_TOKENS` tokens.

    Args:
        layer, call: weights and contiguous arguments.
        config: shape of the launch. sections: what y will hold, ROUTED, SHARED or BOTH.
        dependent: programmatic dependent launch: a kernel is scheduled while the one before it ends.
    """

    layer: Weights
    call: Call
    config: HopperConfig
    sections: int
    dependent: bool

    def __post_init__(self) -> None:
        self.rows, self.hidden = self.call.x.shape
        self.sized_for = _sized_for(self.call)
        self.shared = self.layer.shared_up is not None and bool(self.sections & SHARED)
        self.top_k = self.call.topk_ids.shape[1] if self.sections & ROUTED else 0
        g = self.layer.geometry
        cut_steps = self.config.routed_steps[0] if self.config.parts > 1 else 0
        sizes = workspace.Sizes(
            self.rows, self.top_k, self.layer.experts, self.shared, g.hidden, g.h_stride, g.dtype, cut_steps
        )
        self.buffers = workspace.allocate(sizes, self.layer.device)

    def prologue(self) -> None:
        """Fill the sorted rows, their positions and the control block."""
        call, b, config = self.call, self.buffers, self.config
        routes, experts = self.rows * self.top_k, self.layer.experts
        sized_for = self.sized_for * self.top_k
        tensors, numbers, kinds = bounds(call)
        groups = triton.next_power_of_2(self.hidden // 128)
        whole = self.layer.geometry.token_scales
        fine = min(8, groups) if self.sized_for <= 64 and not whole else groups
        parts = triton.cdiv(self.hidden, fine * 128)
        columns = {
            "KP": triton.next_power_of_2(max(self.top_k, 1)),
            "H": self.hidden,
            "G": fine,
            "PARTS": parts,
            "WHOLE": whole,
            "PERMUTED": self.layer.geometry.permuted,
            "QUANTISED": self.layer.geometry.quantised,
        }
        tiles = {"NT": config.tokens, "NTS": config.shared_tokens, "HAS_SHARED": self.shared, "CUT": config.parts > 1}
        common = {"EP": max(16, triton.next_power_of_2(experts)), "num_warps": _WARPS}
        block = min(512, max(32, triton.next_power_of_2(max(sized_for, 1))))
        places = {"x": call.x, "ids": call.topk_ids, "xq": b.xq, "xs": b.xs, "pos": b.pos}
        if sized_for <= heuristics.SMALL_ROUTES:
            launch(
                prologue.prologue,
                (1 + self.rows * parts,),
                {**places, "control": b.control, "strays": self.layer.strays, **tensors},
                {**numbers, "M": self.rows, "E": experts, "capacity": b.capacity, "row_capacity": b.row_capacity},
                **{**columns, **tiles, **common, **kinds, **self._dependence()},
                K=self.top_k,
                BLOCK=block,
            )
            return
        span = heuristics.ROUTE_BLOCK // self.top_k * self.top_k
        blocks = triton.cdiv(routes, span)
        counting = {"K": self.top_k, "BLOCK": block, "ROUTES": span, "VALID_TENSOR": kinds["VALID_TENSOR"]}
        counting |= self._dependence()
        valid = {name: value for name, value in tensors.items() if name == "valid_rows"}
        valid_number = {name: value for name, value in numbers.items() if name == "valid_rows"}
        launch(
            prologue.count_routes,
            (blocks,),
            {"ids": call.topk_ids, "block_counts": b.block_counts, "strays": self.layer.strays, **valid},
            {**valid_number, "M": self.rows, "E": experts},
            **counting,
            **common,
        )
        launch(
            prologue.list_tiles,
            (1,),
            {"block_counts": b.block_counts, "control": b.control, **tensors},
            {**numbers, "M": self.rows, "capacity": b.capacity, "blocks": blocks},
            CHUNK=max(1, _CHUNK // common["EP"]),
            **{**tiles, **common, **kinds, **self._dependence()},
        )
        launch(
            prologue.place_tokens,
            (self.rows * parts,),
            {**places, "block_counts": b.block_counts, **valid},
            {**valid_number, "M": self.rows, "E": experts, "row_capacity": b.row_capacity},
            HAS_SHARED=self.shared,
            **{**columns, **counting, **common},
        )

    def tiles(self, section: int) -> Any:
        """The folded launch over one section of the tiles; one CTA an SM, whatever the batch."""
        layer, b, config = self.layer, self.buffers, self.config
        device = layer.device
        key = (folded_moe, config, self.dependent, device)
        return start(
            folded_moe,
            lambda _: (_processors(device),),
            Variant(key, device, config),
            *descriptors.descriptors(layer, b, config),
            layer.up.factors,
            layer.down.factors,
            b.xs,
            b.h,
            b.hs,
            b.d,
            b.control,
            b.products,
            workspace.stall_report(device),
            section,
            b.capacity,
            b.row_capacity,
            layer.geometry.k_up,
            layer.geometry.k_down4,
            layer.geometry.k_down8,
            config,
            num_warps=_WARPS,
            maxnreg=config.launch_registers,
            launch_pdl=self.dependent,
        )

    def combine(self, y: Tensor) -> None:
        """Weigh, add, round."""
        call, b = self.call, self.buffers
        tensors, numbers, kinds = bounds(call)
        block = 512 if self.sized_for <= 64 else 1024
        shared_weights = call.topk_weights if call.shared_weights is None else call.shared_weights
        parts = {"d": b.d, "pos": b.pos, "weights": call.topk_weights, "shared_weights": shared_weights, "y": y}
        launch(
            combine,
            (self.rows, triton.cdiv(self.hidden, block)),
            {**parts, **tensors},
            {**numbers, "routed_scale": float(call.routed_scale), "M": self.rows},
            **kinds,
            **self._dependence(),
            K=self.top_k,
            H=self.hidden,
            BLOCK=block,
            HAS_SHARED=self.shared,
            HAS_WEIGHTS=call.shared_weights is not None,
            num_warps=_WARPS,
        )

    def _dependence(self) -> dict[str, bool]:
        return {"PDL": self.dependent, "launch_pdl": self.dependent}


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def run(
    layer: Weights,
    call: Call,
    *,
    launches: tuple[int, ...] = (BOTH,),
    route_share: float = 1.0,
    dtype: torch.dtype | None = None,
    config: HopperConfig | None = None,
    dependent: bool = True,
    side: torch.cuda.Stream | None = None,
) -> Tensor:
    """The layer's output ``[M, H]``.

    Args:
        call: contiguous arguments.
        launches: ROUTED, SHARED or BOTH, one after the other. Together they decide what the output holds.
        route_share: see :class:`foldmoe.backends.base.PackedLayer`.
        dtype: of the output; default x's.
        config: instead of the one that the heuristics choose.
        dependent: see :class:`Step`.
        side: the last of ``launches`` runs on this stream, beside the others; never dependent.
    """
    rows = call.x.shape[0]
    y = torch.empty(rows, layer.geometry.hidden, dtype=dtype or call.x.dtype, device=call.x.device)
    with torch.cuda.device(layer.device) if layer.device.type == "cuda" else nullcontext():
        for start in range(0, rows, MAX_TOKENS):
            end = min(rows, start + MAX_TOKENS)
            part = call if end - start == rows else cut(call, start, end)
            chosen = config or choose(layer, part, route_share).config
            sections = _union(launches)
            step = Step(layer, part, chosen, sections, dependent and side is None)
            step.prologue()
            if side is not None:
                _beside(step, launches, side)
            else:
                for section in launches:
                    step.tiles(section)
            step.combine(y[start:end])
    return y


def choose(layer: Weights, call: Call, route_share: float) -> Choice:
    """The config for a call, and where it comes from."""
    routes_per_row = call.topk_ids.shape[1] * route_share
    return tuned.choose(layer.geometry, _sized_for(call), routes_per_row, layer.experts, layer.gpu, layer.powers)


def _sized_for(call: Call) -> int:
    """Of one launch."""
    return min(call.sized_for, MAX_TOKENS)


def _beside(step: Step, launches: tuple[int, ...], side: torch.cuda.Stream) -> None:
    """All but the last launch on the current stream, the last one on ``side``; the current stream waits for both."""
    main = torch.cuda.current_stream(step.layer.device)
    with beside(main, side):
        with torch.cuda.stream(side):
            step.tiles(launches[-1])
        for section in launches[:-1]:
            step.tiles(section)


def _union(launches: tuple[int, ...]) -> int:
    sections = 0
    for section in launches:
        sections |= section
    return sections
