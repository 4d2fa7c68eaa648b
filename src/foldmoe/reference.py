"""The layer in plain float64, one expert at a time: the only oracle that tests use.

It shares no arithmetic with the backends: weights are dequantised to float64, products are plain matrix products, the
activation is written out again here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from foldmoe.formats import fp8

if TYPE_CHECKING:
    from foldmoe.formats import QuantizedTensor

Precision = Literal["bf16", "fp8", "fp8_token"]


class Experts(Protocol):
    """What the oracle needs of :class:`foldmoe.ExpertWeights`."""

    @property
    def gate_up(self) -> QuantizedTensor: ...
    @property
    def down(self) -> QuantizedTensor: ...


class Clamp(Protocol):
    """What the oracle needs of :class:`foldmoe.Activation`."""

    @property
    def limit(self) -> float | None: ...
    @property
    def alpha(self) -> float: ...
    @property
    def up_offset(self) -> float: ...


def reference_moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    routed: Experts,
    shared: Experts | None = None,
    *,
    activation: Clamp | None = None,
    shared_activation: Clamp | None = None,
    shared_weights: Tensor | None = None,
    routed_scale: float = 1.0,
    activations: Precision = "bf16",
    num_valid_tokens: int | None = None,
    shared_rows: tuple[int, int] | None = None,
) -> Tensor:
    """``y[m] = sum_k w[m,k] * E[id[m,k]](x[m]) + s[m] * S(x[m])``, in float64.

    Args:
        x: ``[M, H]``.
        topk_ids: ``[M, K]``; -1 adds nothing, whatever its weight; duplicates add up.
        topk_weights: ``[M, K]``, used as given.
        routed, shared: gate_up ``[E, 2I, H]`` (gate rows first) and down ``[E, H, I]``; the shared set may hold one
            expert of its own width and format, or be None.
        shared_weights: ``[M]``; 1 where None.
        routed_scale: multiplies the routed sum, never the shared part.
        activations: "bf16" takes x and act(.) as they are; "fp8" quantises both to E4M3 with one scale per token per
            128 columns; "fp8_token" x with one scale a token, act(.) as "fp8" does.
        num_valid_tokens: rows from here on are padding: their output is zero and their input is never read.
        shared_rows: (start, end) rows that get the shared part; all where None.

    Returns:
        ``[M, H]`` float64.
    """
    rows = x.shape[0]
    valid = rows if num_valid_tokens is None else num_valid_tokens
    y = torch.zeros(rows, x.shape[1], dtype=torch.float64, device=x.device)
    live = x[:valid]
    for expert in range(routed.down.shape[0]):
        token, k = (topk_ids[:valid] == expert).nonzero(as_tuple=True)
        if len(token):
            out = _expert(live[token], routed.gate_up[expert], routed.down[expert], activation, activations)
            weight = topk_weights[token, k].to(torch.float64)[:, None] * routed_scale
            y.index_add_(0, token, out * weight)
    if shared is not None:
        start, end = (0, valid) if shared_rows is None else (min(shared_rows[0], valid), min(shared_rows[1], valid))
        clamp = activation if shared_activation is None else shared_activation
        out = _expert(live[start:end], shared.gate_up[0], shared.down[0], clamp, activations)
        if shared_weights is not None:
            out = out * shared_weights[start:end].to(torch.float64)[:, None]
        y[start:end] += out
    return y


def _expert(
    x: Tensor, gate_up: QuantizedTensor, down: QuantizedTensor, clamp: Clamp | None, activations: Precision
) -> Tensor:
    gate, up = (_operand(x, activations) @ gate_up.dequantize(torch.float64).T).chunk(2, dim=-1)
    limit = clamp.limit if clamp is not None else None
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    alpha, offset = (clamp.alpha, clamp.up_offset) if clamp is not None else (1.0, 0.0)
    hidden = gate * torch.sigmoid(alpha * gate) * (up + offset)
    return _operand(hidden, "fp8" if activations == "fp8_token" else activations) @ down.dequantize(torch.float64).T


def _operand(x: Tensor, activations: Precision) -> Tensor:
    if activations == "bf16":
        return x.to(torch.float64)
    values, scale = fp8.quantize_activations(x.to(torch.float32), None if activations == "fp8_token" else 128)
    return fp8.dequantize_activations(values, scale, torch.float64)


def relative_error(y: Tensor, reference: Tensor) -> float:
    """||y - ref|| / ||ref|| in float64; infinite where y holds NaN or Inf, so that such a result never passes."""
    wide, truth = y.to(torch.float64), reference.to(torch.float64)
    if not bool(torch.isfinite(wide).all()):
        return float("inf")
    norm = float(truth.norm())
    return float((wide - truth).norm()) / norm if norm else float((wide - truth).norm())
