"""Hugging Face Transformers' registered experts functions, in DeepSeek-V4's own modules (they clamp as V4 does)."""

from __future__ import annotations

from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from foldmoe.bench.peers.base import Peer, PeerLayer, hopper, installed
from foldmoe.bench.peers.torch_weights import bf16

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import Activation, ExpertWeights, LayerSpec

_MODEL = "transformers.models.deepseek_v4"


def _parameter(values: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(values, requires_grad=False)


def _config(hidden: int, weights: ExpertWeights, activation: Activation, implementation: str) -> Any:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    config = DeepseekV4Config(hidden_size=hidden)
    config.num_local_experts, config.intermediate_size = weights.num_experts, weights.width
    config.swiglu_limit = inf if activation.limit is None else activation.limit
    config._experts_implementation = implementation
    return config


class TransformersLayer(PeerLayer):
    """``DeepseekV4Experts`` and ``DeepseekV4MLP`` over weights dequantised to bf16."""

    def __init__(self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, implementation: str) -> None:
        from transformers.models.deepseek_v4 import modeling_deepseek_v4 as model

        with torch.device("meta"):
            self.experts = model.DeepseekV4Experts(_config(spec.hidden, routed, spec.activation, implementation))
            self.mlp = model.DeepseekV4MLP(_config(spec.hidden, shared, spec.shared_activation, implementation))
        self.experts.gate_up_proj = _parameter(bf16(routed.gate_up))
        self.experts.down_proj = _parameter(bf16(routed.down))
        gate, up = (half[0].dequantize(torch.bfloat16) for half in shared.gate_and_up())
        down = shared.down[0].dequantize(torch.bfloat16)
        for name, values in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            getattr(self.mlp, name).weight = _parameter(values)

    def routed(self, batch: Batch) -> Tensor:
        y: Tensor = self.experts(batch.x, batch.topk_ids.long(), batch.topk_weights)
        return y

    def shared(self, batch: Batch) -> Tensor:
        y: Tensor = self.mlp(batch.x)
        return y


class TransformersGrouped(Peer):
    """W16A16, Transformers' default: weights dequantised to bf16 (3.8 times MXFP4's bytes)."""

    name = "transformers"
    package = "transformers"
    tolerance = 0.01
    implementation: ClassVar[str] = "grouped_mm"

    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        if reason := installed(self.package):
            return [reason]
        found = [] if spec.shared else ["the layer has no shared expert"]
        if find_spec(_MODEL) is None:
            found.append(f"this transformers has no {_MODEL}, whose experts clamp as the layer does")
        return found

    def prepare(
        self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]
    ) -> PeerLayer:
        return TransformersLayer(spec, routed, shared, self.implementation)


class TransformersDeepGemm(TransformersGrouped):
    """The same by DeepGEMM, fetched from the Hub (kernels-community/deep-gemm)."""

    name = "transformers-deepgemm"
    implementation: ClassVar[str] = "deepgemm"

    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        found = super().refusals(spec, device)
        return found + [reason for reason in (hopper(device), installed("kernels")) if reason]
