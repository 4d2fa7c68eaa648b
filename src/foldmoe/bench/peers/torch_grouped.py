"""torch's own grouped products: routes sorted, gathered, multiplied and put back with torch operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from foldmoe.bench.peers.base import Peer, PeerLayer, hopper
from foldmoe.bench.peers.torch_weights import BlockLinear, PlainLinear, bf16, per_row, round_rows
from foldmoe.formats import Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.formats import QuantizedTensor
    from foldmoe.moe import Activation, ExpertWeights, LayerSpec


class GroupedBf16:
    """``[E, N, K]`` dequantised to bf16."""

    def __init__(self, stored: QuantizedTensor) -> None:
        self.weight = bf16(stored).transpose(-2, -1)

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """``[S, K]`` rows sorted by expert, int32 ``[E]`` one past each expert's last row, to ``[S, N]``."""
        return functional.grouped_mm(x, self.weight, offs=ends)


class GroupedFp8:
    """``[E, N, K]`` in E4M3 with one scale a row, as torch's grouped FP8 product takes it on sm_90."""

    def __init__(self, stored: QuantizedTensor) -> None:
        values, self.scales = per_row(stored)
        self.values = values.transpose(-2, -1)

    def __call__(self, x: Tensor, ends: Tensor) -> Tensor:
        """As :class:`GroupedBf16`; x is rounded to E4M3 with one scale a row."""
        by_row = functional.ScalingType.RowWise
        values, scales = round_rows(x)
        y: Tensor = functional.scaled_grouped_mm(  # type: ignore[attr-defined]
            values, self.values, scales, by_row, self.scales, by_row, offs=ends, output_dtype=torch.bfloat16
        )
        return y


class TorchLayer(PeerLayer):
    """Routed experts by grouped products, the shared expert by plain ones."""

    def __init__(
        self,
        spec: LayerSpec,
        routed: tuple[GroupedBf16 | GroupedFp8, GroupedBf16 | GroupedFp8],
        shared: tuple[BlockLinear | PlainLinear, BlockLinear | PlainLinear],
    ) -> None:
        self.spec = spec
        self.up, self.down = routed
        self.shared_up, self.shared_down = shared

    def routed(self, batch: Batch) -> Tensor:
        """``[M, H]``, weighted and added."""
        tokens, top_k = batch.topk_ids.shape
        ids, order = batch.topk_ids.flatten().sort()
        experts = torch.arange(self.spec.routed.count, device=ids.device, dtype=ids.dtype)
        ends = torch.searchsorted(ids, experts, right=True).to(torch.int32)
        hidden = _gated(self.up(batch.x[order // top_k], ends), self.spec.activation)
        down = self.down(hidden, ends)
        out = torch.empty_like(down).index_copy_(0, order, down)
        return (out.view(tokens, top_k, -1) * batch.topk_weights[..., None]).sum(1).to(batch.x.dtype)

    def shared(self, batch: Batch) -> Tensor:
        return self.shared_down(_gated(self.shared_up(batch.x), self.spec.shared_activation))


def _gated(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return activation(gate, up)


class TorchBf16(Peer):
    """W16A16: weights dequantised to bf16 (3.8 times MXFP4's bytes), which torch runs everywhere."""

    name = "torch-bf16"
    package = "torch"
    tolerance = 0.01

    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        if not hasattr(functional, "grouped_mm"):
            return [f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"]
        return [] if spec.shared else ["the layer has no shared expert"]

    def prepare(
        self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]
    ) -> PeerLayer:
        return TorchLayer(
            spec,
            (GroupedBf16(routed.gate_up), GroupedBf16(routed.down)),
            (PlainLinear(shared.gate_up[0]), PlainLinear(shared.down[0])),
        )


class TorchFp8(Peer):
    """W8A8 on Hopper: one scale a row of weights and of tokens (1.9 times MXFP4's bytes)."""

    name = "torch-fp8"
    package = "torch"
    tolerance = 0.08

    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        found = [reason] if (reason := hopper(device)) else []
        if not hasattr(functional, "scaled_grouped_mm"):
            found.append(f"torch {torch.__version__} has no torch.nn.functional.scaled_grouped_mm")
        if spec.routed.format is Format.BF16 or spec.shared is None:
            found.append("compares quantised layers with a shared expert; --peers torch-bf16 takes the others")
        return found

    def prepare(
        self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]
    ) -> PeerLayer:
        linear = BlockLinear if shared.format is Format.FP8_128x128 else PlainLinear
        return TorchLayer(
            spec,
            (GroupedFp8(routed.gate_up), GroupedFp8(routed.down)),
            (linear(shared.gate_up[0]), linear(shared.down[0])),
        )
