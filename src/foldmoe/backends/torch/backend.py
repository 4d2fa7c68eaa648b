"""The torch backend: every format, any device, weights left as stored.

Routes are sorted by expert; each expert that has tokens is upcast, used and dropped, so that at most one is alive in
wide numbers at a time. The shared expert is one more entry of the same loop. Expert counts are read on the host, so this
backend does not go into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from foldmoe.backends.base import Backend, Call, PackedLayer
from foldmoe.backends.torch.linear import grouped_linear, upcast
from foldmoe.formats import Format, QuantizedTensor, fp8
from foldmoe.moe import Activation, ExpertWeights, LayerSpec

if TYPE_CHECKING:
    from foldmoe.moe.spec import ActivationPrecision
    from foldmoe.planner.devices import Device

Keep = Literal["packed", "bf16"]

_COLUMNS_FROM = 8
"""Rows an expert from which tokens go as columns (bf16, H 1024, one CPU core: 0.13 ms instead of 0.19 for 8 rows)."""


class TorchBackend(Backend):
    """Plain torch on any device.

    Args:
        keep: "packed" leaves weights as stored; "bf16" upcasts them once, at load, and holds only that (two to four
            times the memory, faster on a CPU; FP8 with float32 scales is rounded to bf16).
    """

    name: ClassVar[str] = "torch"
    deterministic: ClassVar[bool] = False  # the matrix library picks its kernel by the number of rows

    def __init__(self, keep: Keep = "packed") -> None:
        self.keep: Keep = keep

    def unavailable(self, device: Device) -> str | None:
        return None

    def supports(self, spec: LayerSpec, activations: ActivationPrecision) -> tuple[str, ...]:
        return ()

    def pack(
        self,
        routed: ExpertWeights,
        shared: ExpertWeights | None,
        *,
        activation: Activation,
        shared_activation: Activation,
        activations: ActivationPrecision,
        consume: bool = False,
    ) -> PackedLayer:
        if self.keep == "bf16":
            routed, shared = _plain(routed), _plain(shared) if shared else None
        return TorchLayer(routed, shared, activation, shared_activation, activations)


def _plain(weights: ExpertWeights) -> ExpertWeights:
    parts = (QuantizedTensor(t.dequantize(torch.bfloat16), format=Format.BF16) for t in (weights.gate_up, weights.down))
    return ExpertWeights(*parts)


@dataclass(frozen=True, eq=False)
class TorchLayer(PackedLayer):
    """Weights as stored, and how to run them."""

    routed: ExpertWeights
    shared: ExpertWeights | None
    activation: Activation
    shared_activation: Activation
    activations: ActivationPrecision

    def forward(self, call: Call, *, folded: bool) -> Tensor:
        valid = _valid(call)
        x = self._operand(call.x[:valid])
        ids, weights = call.topk_ids[:valid], call.topk_weights[:valid]
        y = torch.zeros(call.x.shape, dtype=torch.float32, device=call.x.device)
        y[:valid] = self._routed(x, ids, weights, call.routed_scale)
        if self.shared is not None:
            shared_input = x if folded else self._operand(call.x[:valid])
            self._add_shared(y, shared_input, call, valid)
        return y.to(call.x.dtype)

    def forward_shared(self, call: Call) -> Tensor:
        y = torch.zeros(call.x.shape, dtype=torch.float32, device=call.x.device)
        if self.shared is not None:
            valid = _valid(call)
            self._add_shared(y, self._operand(call.x[:valid]), call, valid)
        return y

    def unpack(self) -> tuple[ExpertWeights, ExpertWeights | None]:
        return self.routed, self.shared

    @property
    def nbytes(self) -> int:
        return self.routed.nbytes + (self.shared.nbytes if self.shared else 0)

    def _operand(self, x: Tensor) -> Tensor:
        """x or act(.) in the precision of a GEMM's input; quantised values are multiplied out, exactly, in float32."""
        if self.activations == "bf16":
            return x
        group = None if self.activations == "fp8_token" else fp8.ACTIVATION_GROUP
        return fp8.dequantize_activations(*fp8.quantize_activations(x, group))

    def _compute_dtype(self, x: Tensor, weights: ExpertWeights) -> torch.dtype:
        """Half precision where x and weights are both stored in it, as every engine multiplies them; else float32.

        Upcast weights take float32: the product then keeps what the upcast gave, and a bf16 gate would move quantised
        activations across E4M3 rounding steps.
        """
        plain = weights.format is Format.BF16 and self.activations == "bf16"
        same = weights.gate_up.values.dtype == weights.down.values.dtype == x.dtype
        return x.dtype if plain and same else torch.float32

    def _routed(self, x: Tensor, ids: Tensor, weights: Tensor, routed_scale: float) -> Tensor:
        """``[M, H]`` float32: the weighted sum over k, in the order of k."""
        tokens, k = ids.shape
        experts, hidden = self.routed.num_experts, self.routed.hidden
        if not tokens or not k:
            return x.new_zeros(tokens, hidden, dtype=torch.float32)
        flat = ids.flatten()
        valid = (flat >= 0) & (flat < experts)
        flat = torch.where(valid, flat, experts)
        by_expert = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=experts + 1)[:experts].tolist()
        dtype = self._compute_dtype(x, self.routed)
        token_of = (by_expert // k)[: sum(counts)]
        results = self._experts(x.to(dtype).index_select(0, token_of), counts, self.routed, self.activation)
        outputs = torch.zeros(tokens * k, hidden, dtype=torch.float32, device=x.device)
        outputs[by_expert[: len(token_of)]] = results.to(torch.float32)
        scaled = torch.where(valid.view(tokens, k), weights * routed_scale, 0.0)
        return torch.bmm(scaled[:, None], outputs.view(tokens, k, hidden))[:, 0]

    def _add_shared(self, y: Tensor, x: Tensor, call: Call, valid: int) -> None:
        assert self.shared is not None
        start, end = _rows(call, valid)
        if start >= end:
            return
        dtype = self._compute_dtype(x, self.shared)
        rows = x[start:end].to(dtype)
        out = self._experts(rows, [end - start], self.shared, self.shared_activation).to(torch.float32)
        if call.shared_weights is not None:
            out = out * call.shared_weights[start:end, None]
        y[start:end] += out

    def _experts(self, x: Tensor, counts: list[int], weights: ExpertWeights, activation: Activation) -> Tensor:
        """Rows sorted by expert ``[T, H]`` through their experts, ``[T, H]`` in the same dtype."""
        # The activation is computed wide: every bf16 rounding left out here is error saved (five of them reach 4e-3).
        if x.dtype != torch.float32 and len(x) >= _COLUMNS_FROM * sum(count > 0 for count in counts):
            return self._columns(x, counts, weights, activation)
        gate, up = grouped_linear(x, counts, weights.gate_up).to(torch.float32).chunk(2, dim=-1)
        hidden = self._operand(activation(gate, up)).to(x.dtype)
        return grouped_linear(hidden, counts, weights.down)

    def _columns(self, x: Tensor, counts: list[int], weights: ExpertWeights, activation: Activation) -> Tensor:
        """:meth:`_experts` with tokens as columns: W @ x.T leaves the weights, the larger operand, as they lie."""
        out = torch.empty(len(x), weights.hidden, dtype=x.dtype, device=x.device)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                rows = slice(start, start + count)
                projected = torch.mm(upcast(weights.gate_up[expert], x.dtype), x[rows].t()).to(torch.float32)
                hidden = self._operand(activation(*projected.chunk(2)).t()).t().to(x.dtype)
                out[rows] = torch.mm(upcast(weights.down[expert], x.dtype), hidden).t()
                start += count
        return out


def _valid(call: Call) -> int:
    if call.num_valid_tokens is None:
        return call.x.shape[0]
    return max(0, min(int(call.num_valid_tokens), call.x.shape[0]))


def _rows(call: Call, valid: int) -> tuple[int, int]:
    if call.shared_rows is None:
        return 0, valid
    start, end = (int(row) for row in call.shared_rows)
    return max(start, 0), min(end, valid)
