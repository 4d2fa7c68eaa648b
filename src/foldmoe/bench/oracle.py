"""Every row of a benchmark is checked against the float64 oracle before it is timed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foldmoe import reference

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.moe import ExpertWeights, LayerSpec
    from foldmoe.moe.spec import ActivationPrecision

CHECKED_TOKENS = 8
"""Rows are independent, so that a few tell of all."""


def error(
    y: Tensor,
    batch: Batch,
    spec: LayerSpec,
    weights: tuple[ExpertWeights, ExpertWeights],
    precision: ActivationPrecision,
) -> float:
    """Relative error of the first rows of ``y [M, H]``; the oracle rounds activations as ``precision`` says."""
    rows = slice(0, min(len(batch.x), CHECKED_TOKENS))
    truth = reference.reference_moe(
        batch.x[rows],
        batch.topk_ids[rows],
        batch.topk_weights[rows],
        *weights,
        activation=spec.activation,
        shared_activation=spec.shared_activation,
        activations=precision,
    )
    return reference.relative_error(y[rows], truth)
