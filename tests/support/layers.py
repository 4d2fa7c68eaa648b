"""``FoldedMoE`` on the torch backend in each of its three strategies, and experts with an output that is known."""

from __future__ import annotations

from math import exp
from typing import TYPE_CHECKING, Any

import torch

from foldmoe.formats import Format, QuantizedTensor
from foldmoe.layer import FoldedMoE
from foldmoe.moe import ExpertWeights
from foldmoe.planner import FusionPolicy

if TYPE_CHECKING:
    from foldmoe.planner.policy import ActivationChoice, Fold

FOLDS: tuple[Fold, ...] = ("native", "slot", "off")
STRATEGY = {"native": "native", "slot": "slot", "off": "serial"}

HIDDEN, WIDTH = 8, 4
"""Of :func:`constant_experts`."""


def fold_layer(
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    fold: Fold,
    *,
    activations: ActivationChoice = "bf16",
    backend: str = "torch",
    allow_requantize: bool = False,
    **facts: Any,
) -> FoldedMoE:
    """A layer that certainly runs the asked strategy."""
    policy = FusionPolicy(fold, allow_requantize=allow_requantize, activations=activations, backend=backend)
    layer = FoldedMoE(routed, shared, policy=policy, **facts)
    if shared is not None:
        assert layer.plan.strategy == STRATEGY[fold], layer.plan.reasons
    return layer


def plain(values: torch.Tensor) -> QuantizedTensor:
    """Float32 numbers as they are."""
    return QuantizedTensor(values.to(torch.float32), format=Format.BF16)


def constant_experts(*outputs: float, gate: float = 1.0, up: float = 1.0) -> ExpertWeights:
    """Experts that answer x = ones with a constant each, in every column.

    Args:
        outputs: one constant an expert.
        gate, up: what the projections give for x = ones.
    """
    act = gate / (1 + exp(-gate)) * up
    rows = torch.tensor([gate] * WIDTH + [up] * WIDTH)[:, None].expand(-1, HIDDEN) / HIDDEN
    down = torch.tensor(outputs)[:, None, None].expand(-1, HIDDEN, WIDTH) / (WIDTH * act)
    return ExpertWeights(plain(rows.repeat(len(outputs), 1, 1)), plain(down))


def ones(tokens: int) -> torch.Tensor:
    """Input for :func:`constant_experts`."""
    return torch.ones(tokens, HIDDEN)
