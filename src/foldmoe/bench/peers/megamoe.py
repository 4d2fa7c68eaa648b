"""DeepGEMM's MegaMoE for Hopper (sgl-deep-gemm): one launch for FP8 experts, the shared expert as one expert more.

Two launches: x rounded and the routes copied (``mega_moe_pre_dispatch_sm90``), then all else (``fp8_mega_moe``).
DeepGEMM itself, and the copies in vLLM 0.25 and 0.33, have MegaMoE for sm_100 alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foldmoe.bench.peers.base import ONE_MORE, Peer, PeerLayer, hopper, installed
from foldmoe.bench.peers.fp8_experts import block_fp8
from foldmoe.bench.peers.vllm_layer import stored

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec

_MULTIPLE = 128
_LARGEST = 8192
"""Hidden size: the first launch rounds a token with one thread for 8 columns, 1024 at most."""


class MegaLayer(PeerLayer):
    """Routed experts and, after them, the shared one."""

    def __init__(self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]) -> None:
        import deep_gemm

        self.spec = spec
        self.experts = spec.routed.count + 1
        self.up, self.down = deep_gemm.transform_weights_for_mega_moe_sm90(
            block_fp8(routed.gate_up, shared.gate_up), block_fp8(routed.down, shared.down)
        )
        # The launch chooses its tiles by the buffer's capacity: no larger a one than a number of rows needs.
        self.buffers = {rows: self._buffer(rows, routed.down.device) for rows in {capacity(count) for count in tokens}}
        self.routes: WeakKeyDictionary[Batch, tuple[Tensor, Tensor]] = WeakKeyDictionary()

    def _buffer(self, rows: int, device: torch.device) -> Any:
        """What ``get_symm_buffer_for_sm90_mega_moe`` returns, for one rank: plain memory and no process group."""
        from deep_gemm import _C

        nbytes, slices = _C.get_symm_buffer_size_for_sm90_mega_moe(
            1, self.experts, rows, self.spec.top_k + 1, self.spec.hidden, self.spec.routed.width, True, "swiglu"
        )
        memory = torch.zeros(nbytes, dtype=torch.int8, device=device)
        x, x_sf, topk_idx, topk_weights = (_tensor(part) for part in slices(memory)[:4])
        return SimpleNamespace(
            group=SimpleNamespace(rank=lambda: 0),
            buffer=memory,
            handle=SimpleNamespace(buffer_ptrs=[memory.data_ptr()]),
            num_experts=self.experts,
            num_max_tokens_per_rank=rows,
            num_topk=self.spec.top_k + 1,
            x=x.view(torch.float8_e4m3fn),
            x_sf=x_sf,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
        )

    def routed(self, batch: Batch) -> Tensor:
        """``[M, H]``: the whole layer."""
        import deep_gemm

        if batch not in self.routes:
            self.routes[batch] = one_more(batch, self.spec.routed.count)
        ids, weights = self.routes[batch]
        buffer = self.buffers[capacity(len(batch.x))]
        deep_gemm.mega_moe_pre_dispatch_sm90(
            batch.x, ids, weights, buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights, num_tokens=len(batch.x)
        )
        y = torch.empty_like(batch.x)
        deep_gemm.fp8_mega_moe(y, self.up, self.down, buffer, activation_clamp=self.spec.activation.limit)
        return y

    def shared(self, batch: Batch) -> Tensor:
        return batch.x.new_empty(0)

    def combine(self, batch: Batch, routed: Tensor, shared: Tensor) -> Tensor:
        return routed


def capacity(tokens: int) -> int:
    """Rows of the smallest buffer for ``tokens``."""
    from deep_gemm import _C
    from deep_gemm.utils.math import align

    return int(align(tokens, _C.get_token_alignment_for_mega_moe()))


def one_more(batch: Batch, expert: int) -> tuple[Tensor, Tensor]:
    """Routes ``[M, K + 1]`` int32 and float32 with ``expert`` last, at weight 1. Made once: a router that knows of the
    extra expert writes them itself."""
    rows = (len(batch.x), 1)
    ids = torch.cat([batch.topk_ids, batch.topk_ids.new_full(rows, expert)], dim=1)
    return ids, torch.cat([batch.topk_weights, batch.topk_weights.new_ones(rows)], dim=1)


def _tensor(part: Any) -> Tensor:
    return part if isinstance(part, Tensor) else torch.utils.dlpack.from_dlpack(part)


class MegaMoE(Peer):
    """W8A8, 1x128 by 128x128 scales (1.9 times MXFP4's bytes); SGLang's build, the one with a kernel for Hopper."""

    name = "megamoe"
    package = "sgl-deep-gemm==0.1.4.post1"  # the last that loads with torch 2.11
    tolerance = 0.08
    arms: ClassVar[tuple[str, ...]] = ONE_MORE

    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        found = [reason for reason in (installed(self.package), installed("apache-tvm-ffi"), hopper(device)) if reason]
        found += stored(spec)
        if spec.shared is not None and spec.shared.width != spec.routed.width:
            found.append(
                f"one expert more has the routed width {spec.routed.width}, the shared one {spec.shared.width}"
            )
        if spec.activation != spec.shared_activation:
            found.append("one launch has one activation, the shared expert's is another")
        if spec.hidden % _MULTIPLE or spec.routed.width % _MULTIPLE or spec.hidden > _LARGEST:
            found.append(
                f"takes multiples of {_MULTIPLE}, hidden sizes up to {_LARGEST}; "
                f"found hidden {spec.hidden} and width {spec.routed.width}"
            )
        return found

    def prepare(
        self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]
    ) -> PeerLayer:
        return MegaLayer(spec, routed, shared, tokens)
