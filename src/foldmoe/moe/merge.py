"""The slot fold's weights: the shared expert as one more routed expert."""

from __future__ import annotations

from foldmoe.formats import mxfp4
from foldmoe.formats.cutting import append
from foldmoe.moe.weights import ExpertWeights


def slot_weights(shared: ExpertWeights, *, requantize: bool, padded_width: int | None) -> ExpertWeights:
    """The shared expert in a routed expert's format and width.

    Args:
        shared: as stored.
        requantize: lower it to MXFP4.
        padded_width: widen it with zeros; None leaves it.
    """
    if requantize:
        shared = ExpertWeights(mxfp4.quantize(shared.gate_up.dequantize()), mxfp4.quantize(shared.down.dequantize()))
    return shared.padded(padded_width) if padded_width else shared


def append_expert(routed: ExpertWeights, extra: ExpertWeights) -> ExpertWeights:
    """One stack of E + 1 experts.

    Raises:
        ValueError: if the two sets differ in width or storage.
    """
    try:
        return ExpertWeights(append(routed.gate_up, extra.gate_up), append(routed.down, extra.down))
    except ValueError as error:
        raise ValueError(f"slot: the shared expert is no routed expert: {error}") from error
