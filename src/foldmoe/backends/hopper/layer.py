"""A packed layer on one Hopper GPU, and which launches a call takes."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch

from foldmoe.backends.base import Call, PackedLayer
from foldmoe.backends.hopper import launch, pack, pack_bf16, pack_fp8, workspace
from foldmoe.backends.hopper.batch import BOTH, ROUTED, SHARED, Weights, contiguous
from foldmoe.backends.hopper.pack_bf16 import PackedBf16
from foldmoe.backends.triton.rank_routes import rank_routes
from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import ExpertWeights
from foldmoe.runtime.workspace import held_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.backends.hopper.heuristics import HopperConfig
    from foldmoe.backends.hopper.pack import PackedRouted
    from foldmoe.backends.hopper.pack_fp8 import PackedFp8


class HopperLayer(PackedLayer):
    """Weights in the kernels' layout, and how to run them.

    Folded, serial and dual-stream launches run the same tiles and the same combine: all give the same bits.

    Args:
        weights: packed.
        dtypes: torch dtypes of the stored routed tensors, by role.
        routed_format, shared_format: formats of the stored experts.
    """

    def __init__(
        self,
        weights: Weights,
        dtypes: dict[str, torch.dtype],
        routed_format: Format,
        shared_format: Format | None,
    ) -> None:
        self.weights = weights
        self.config: HopperConfig | None = None
        """Runs every batch where it is set; for tuning and tests."""
        self._dtypes = dtypes
        self._formats = routed_format, shared_format
        self._last: HopperConfig | None = None
        self._found: Counter[str] = Counter()

    def forward(self, call: Call, *, folded: bool) -> Tensor:
        launches = self._launches(call, routed=True)
        if folded and len(launches) == 2:
            launches = (BOTH,)
        return self._run(call, launches)

    def _rank_routes(self, call: Call, experts: range, count: int, slot: bool) -> Call:
        return rank_routes(call, experts, count, slot, self.weights.strays)

    def forward_shared(self, call: Call) -> Tensor:
        return self._run(call, self._launches(call, routed=False), dtype=torch.float32)

    def forward_dual(self, call: Call, stream: torch.cuda.Stream | None) -> Tensor:
        """One prologue, routed tiles on the current stream beside shared tiles on ``stream``, one combine."""
        launches = self._launches(call, routed=True)
        two = len(launches) == 2
        return self._run(call, launches, side=stream if two else None, dependent=not two)

    def _launches(self, call: Call, *, routed: bool) -> tuple[int, ...]:
        """Sections that have anything to do, as far as the host knows; the shared one among ranks that choose alike."""
        rows = call.shared_rows
        nowhere = isinstance(rows, tuple) and rows[0] >= rows[1] and call.most_rows is None
        found = []
        if routed and call.topk_ids.shape[1]:
            found.append(ROUTED)
        if self.weights.shared_up is not None and not nowhere:
            found.append(SHARED)
        return tuple(found)

    def _run(
        self,
        call: Call,
        launches: tuple[int, ...],
        *,
        dtype: torch.dtype | None = None,
        side: torch.cuda.Stream | None = None,
        dependent: bool = True,
    ) -> Tensor:
        if not call.x.shape[0] or not launches:
            return torch.zeros_like(call.x, dtype=dtype)
        call = contiguous(call)
        if self.config is None:
            choice = launch.choose(self.weights, call, self.route_share)
            self._found[choice.source] += 1
            self._last = choice.config
        else:
            self._last = self.config
        return launch.run(
            self.weights,
            call,
            launches=launches,
            route_share=self.route_share,
            dtype=dtype,
            config=self.config,
            side=side,
            dependent=dependent,
        )

    def unpack(self) -> tuple[ExpertWeights, ExpertWeights | None]:
        w = self.weights
        routed = ExpertWeights(self._unpacked("up", w.up), self._unpacked("down", w.down))
        if w.shared_up is None or w.shared_down is None:
            return routed, None
        shared = ExpertWeights(*(_unpacked(matrix, self._formats[1]) for matrix in (w.shared_up, w.shared_down)))
        return routed, shared

    def _unpacked(self, role: str, matrix: PackedRouted | PackedFp8 | PackedBf16) -> QuantizedTensor:
        if not isinstance(matrix, pack.PackedRouted):
            return _unpacked(matrix, self._formats[0])
        codes, scales = pack.unpack_mxfp4(matrix)
        values, scales = codes.view(self._dtypes[role]), scales.view(self._dtypes[f"{role}_scales"])
        return QuantizedTensor(values, scales, format=Format.MXFP4)

    @property
    def nbytes(self) -> int:
        return self.weights.nbytes

    @property
    def workspace_nbytes(self) -> int:
        return held_bytes(self.weights.device)

    def stats(self) -> dict[str, object]:
        """``ids_out_of_range`` counts since packing (reads the device), ``config`` is the one last chosen.

        ``tuned`` and ``heuristic`` count the calls, CUDA graph replays left out, of sizes that the table of measured
        tiles (:mod:`foldmoe.backends.hopper.tuned`) has and has not.

        Raises:
            RuntimeError: after a launch that gave up waiting for another part of itself.
        """
        stalled, ticket, found, wanted = workspace.stall_report(self.weights.device).tolist()
        if stalled:
            raise RuntimeError(
                f"foldmoe: a Hopper launch gave up after two seconds: ticket {ticket} waited for {wanted} parts of "
                f"its hidden vectors or of its sum over K, {found} came. Please report this with the layer's plan"
            )
        config = self._last.describe() if self._last else None
        counts = {source: self._found[source] for source in ("tuned", "heuristic")}
        return {"ids_out_of_range": int(self.weights.strays.item()), "config": config, **counts}


def _unpacked(matrix: PackedFp8 | PackedBf16, stored: Format | None) -> QuantizedTensor:
    assert stored is not None
    if isinstance(matrix, PackedBf16):
        return QuantizedTensor(pack_bf16.unpack_bf16(matrix), format=stored)
    values, scales = pack_fp8.unpack_fp8_block(matrix)
    return QuantizedTensor(values, scales, format=stored, block=matrix.block)
