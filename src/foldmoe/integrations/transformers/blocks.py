"""MoE blocks of Transformers models: what they hold, and the block that takes their place."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import Activation, ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foldmoe.layer import FoldedMoE


@dataclass(frozen=True)
class MoEBlock:
    """A stock block and its parts, whatever its class.

    Args:
        name: module path, e.g. ``model.layers.3.mlp``.
        module: the block.
        shared: its shared MLP.
        shared_gate: the linear layer whose sigmoid weighs the shared expert (Qwen), or None.
    """

    name: str
    module: nn.Module
    shared: nn.Module
    shared_gate: nn.Module | None

    @property
    def gate(self) -> nn.Module:
        return self.module.get_submodule("gate")

    @property
    def experts(self) -> nn.Module:
        return self.module.get_submodule("experts")

    @property
    def top_k(self) -> int:
        return int(getattr(self.gate, "top_k", 0))

    @property
    def hashed(self) -> bool:
        """Experts are looked up by token id: the gate wants ``input_ids``."""
        return "input_ids" in inspect.signature(self.gate.forward).parameters

    def obstacles(self) -> tuple[str, ...]:
        """Why the block cannot be swapped; empty if it can."""
        found = []
        for part, module in (("routed experts", self.experts), ("shared expert", self.shared)):
            act = getattr(module, "act_fn", None)
            if not isinstance(act, nn.SiLU) and type(act).__name__ not in ("SiLU", "SiLUActivation"):
                found.append(f"{part} use {type(act).__name__}, only silu(gate) * up is known")
            if any("bias" in name for name, _ in module.named_parameters()):
                found.append(f"{part} have biases")
        if getattr(self.experts, "is_transposed", False):
            found.append("routed experts are stored transposed")
        return tuple(found)

    def activation(self) -> Activation:
        return Activation(getattr(self.experts, "limit", None))

    def weights(self) -> tuple[ExpertWeights, ExpertWeights]:
        """Routed and shared weights; routed ones are the block's own storage."""
        gate, up, down = (_weight(self.shared, part).data for part in ("gate_proj", "up_proj", "down_proj"))
        routed = (self.experts.get_parameter(part).data for part in ("gate_up_proj", "down_proj"))
        shared = (torch.cat((gate, up))[None], down[None])
        return ExpertWeights(*map(_plain, routed)), ExpertWeights(*map(_plain, shared))

    def release(self) -> None:
        """Drop the block's own weights, so that nothing is held twice."""
        for module in (self.experts, self.shared):
            module.to_empty(device="meta")

    def restore(self, routed: ExpertWeights, shared: ExpertWeights, dtype: torch.dtype) -> None:
        """Give the block back its weights, as numbers of ``dtype`` (BF16 ones are taken as they are)."""

        def numbers(tensor: QuantizedTensor) -> Tensor:
            return tensor.values if tensor.values.dtype == dtype else tensor.dequantize(dtype)

        def parameter(values: Tensor) -> nn.Parameter:
            return nn.Parameter(values, requires_grad=False)

        self.experts.gate_up_proj = parameter(numbers(routed.gate_up))
        self.experts.down_proj = parameter(numbers(routed.down))
        for part, half in zip(("gate_proj", "up_proj"), numbers(shared.gate_up)[0].chunk(2), strict=True):
            getattr(self.shared, part).weight = parameter(half)
        self.shared.get_submodule("down_proj").weight = parameter(numbers(shared.down)[0])


def _weight(module: nn.Module, part: str) -> nn.Parameter:
    weight = module.get_submodule(part).weight
    assert isinstance(weight, nn.Parameter)
    return weight


def _plain(values: Tensor) -> QuantizedTensor:
    return QuantizedTensor(values, format=Format.BF16)


def moe_blocks(model: nn.Module) -> Iterator[MoEBlock]:
    """Every block of ``model`` with routed experts and a shared expert, by its parts, not by its class."""
    for name, module in model.named_modules():
        shared = getattr(module, "shared_experts", None) or getattr(module, "shared_expert", None)
        experts = getattr(module, "experts", None)
        if isinstance(shared, nn.Module) and hasattr(module, "gate") and hasattr(experts, "gate_up_proj"):
            yield MoEBlock(name, module, shared, getattr(module, "shared_expert_gate", None))


class FoldedBlock(nn.Module):
    """Router, then routed and shared experts in one call.

    Keeps the stock block aside, weights released, for :func:`unfold`.
    """

    def __init__(self, block: MoEBlock, moe: FoldedMoE) -> None:
        super().__init__()
        self.gate = block.gate
        self.shared_expert_gate = block.shared_gate
        self.moe = moe
        self.hashed = block.hashed
        # Out of reach of named_modules(): the stock block's parameters are empty and belong to no state dict.
        object.__setattr__(self, "stock", block)

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **_: Any) -> Tensor:
        """``[batch, sequence, H]`` to the same shape; ``input_ids`` for layers that route by token id."""
        routing = self.gate(hidden_states, input_ids) if self.hashed else self.gate(hidden_states)
        _, weights, ids = routing
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        shared_weights = None
        if self.shared_expert_gate is not None:
            shared_weights = torch.sigmoid(self.shared_expert_gate(x)).flatten().to(torch.float32)
        y: Tensor = self.moe(x, ids, weights.to(torch.float32), shared_weights=shared_weights)
        return y.view(hidden_states.shape)
