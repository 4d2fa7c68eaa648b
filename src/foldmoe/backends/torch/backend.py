"""The torch backend: every format, any device, weights left as stored.

Routes are sorted by expert; each expert that has tokens is upcast, used and dropped, so that at most one is alive in
wide numbers at a time. The shared expert is one more entry of the same loop. Counts are read on the host, so this
backend does not go into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from foldmoe.backends.base import Backend, Call, PackedLayer
from foldmoe.backends.torch.linear import Groups, grouped_linear
from foldmoe.formats import Format, fp8

if TYPE_CHECKING:
    from foldmoe.moe import Activation, ExpertWeights, LayerSpec
    from foldmoe.moe.spec import ActivationPrecision
    from foldmoe.planner.devices import Device


class TorchBackend(Backend):
    """Plain torch on any device, weights left as stored."""

    name: ClassVar[str] = "torch"
    deterministic: ClassVar[bool] = False  # the matrix library picks its kernel by the number of rows

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
        return TorchLayer(routed, shared, activation, shared_activation, activations)


@dataclass(eq=False)
class TorchLayer(PackedLayer):
    """Weights as stored, and how to run them."""

    routed: ExpertWeights
    shared: ExpertWeights | None
    activation: Activation
    shared_activation: Activation
    activations: ActivationPrecision

    def forward(self, call: Call, *, folded: bool) -> Tensor:
        valid = _valid(call)
        x = self._input(call.x[:valid])
        y = self._routed(x, call, valid)
        if self.shared is not None:
            shared_input = x if folded else self._input(call.x[:valid])
            self._add_shared(y, shared_input, call, valid)
        return _padded(y.to(call.x.dtype), len(call.x))

    def forward_routed(self, call: Call) -> Tensor:
        valid = _valid(call)
        return _padded(self._routed(self._input(call.x[:valid]), call, valid), len(call.x))

    def forward_shared(self, call: Call) -> Tensor:
        y = torch.zeros(call.x.shape, dtype=torch.float32, device=call.x.device)
        if self.shared is not None:
            valid = _valid(call)
            self._add_shared(y, self._input(call.x[:valid]), call, valid)
        return y

    def unpack(self) -> tuple[ExpertWeights, ExpertWeights | None]:
        return self.routed, self.shared

    def stats(self) -> dict[str, object]:
        """``ids_out_of_range`` counts since packing (reads the device)."""
        return {"ids_out_of_range": 0} | super().stats()

    @property
    def nbytes(self) -> int:
        return self.routed.nbytes + (self.shared.nbytes if self.shared else 0)

    def _input(self, x: Tensor) -> Tensor:
        return self._operand(x, None) if self.activations == "fp8_token" else self._operand(x)

    def _operand(self, x: Tensor, group: int | None = fp8.ACTIVATION_GROUP) -> Tensor:
        """x or act(.) in the precision of a GEMM's input; quantised values are multiplied out, exactly, in float32."""
        if self.activations == "bf16":
            return x
        return fp8.dequantize_activations(*fp8.quantize_activations(x, group))

    def _compute_dtype(self, x: Tensor, weights: ExpertWeights) -> torch.dtype:
        """Half precision where x and weights are both stored in it, as every engine multiplies them; else float32.

        Upcast weights take float32: the product then keeps what the upcast gave, and a bf16 gate would move quantised
        activations across E4M3 rounding steps.
        """
        plain = weights.format is Format.BF16 and self.activations == "bf16"
        same = weights.gate_up.values.dtype == weights.down.values.dtype == x.dtype
        return x.dtype if plain and same else torch.float32

    def _routed(self, x: Tensor, call: Call, live: int) -> Tensor:
        """``[live, H]`` float32: the weighted sum over k, in the order of k."""
        ids, weights, routed_scale = call.topk_ids[:live], call.topk_weights[:live], call.routed_scale
        tokens, k = ids.shape
        experts, hidden = self.routed.num_experts, self.routed.hidden
        if not tokens or not k or not experts:
            return x.new_zeros(tokens, hidden, dtype=torch.float32)
        flat = ids.flatten()
        valid = (flat >= 0) & (flat < experts)
        whole = bool(valid.all())
        if not whole:
            self._note_strays(((flat != -1) & ~valid).sum())
            flat = torch.where(valid, flat, experts)
        by_expert = flat.argsort(stable=True)
        groups = Groups(torch.bincount(flat, minlength=experts + 1)[:experts])
        used = tokens * k if whole else int(groups.counts.sum())
        dtype = self._compute_dtype(x, self.routed)
        rows = x.to(dtype).index_select(0, by_expert[:used] // k)
        results = self._experts(rows, groups, self.routed, self.activation)
        if not whole:
            results = torch.cat((results, results.new_zeros(tokens * k - used, hidden)))
            weights = torch.where(valid.view(tokens, k), weights, 0.0)
        place = torch.empty_like(by_expert).scatter_(0, by_expert, torch.arange(tokens * k, device=x.device))
        outputs = results.index_select(0, place).view(tokens, k, hidden).to(torch.float32)
        weights = weights if routed_scale == 1.0 else weights * routed_scale
        return torch.bmm(weights[:, None], outputs)[:, 0]

    def _add_shared(self, y: Tensor, x: Tensor, call: Call, valid: int) -> None:
        assert self.shared is not None
        start, end = _rows(call, valid)
        if start >= end:
            return
        dtype = self._compute_dtype(x, self.shared)
        out = self._experts(x[start:end].to(dtype), Groups.one(end - start), self.shared, self.shared_activation)
        if call.shared_weights is None:
            y[start:end] += out
        else:
            y[start:end] += out * call.shared_weights[start:end, None]

    def _experts(self, x: Tensor, groups: Groups, weights: ExpertWeights, activation: Activation) -> Tensor:
        """Rows sorted by expert ``[T, H]`` through their experts, ``[T, H]`` in the same dtype."""
        # The activation is computed wide: every bf16 rounding left out here is error saved (five of them reach 4e-3).
        gate, up = grouped_linear(x, groups, weights.gate_up).chunk(2, dim=-1)
        hidden = self._operand(activation(gate.to(torch.float32), up)).to(x.dtype)
        return grouped_linear(hidden, groups, weights.down)


def _valid(call: Call) -> int:
    if call.num_valid_tokens is None:
        return call.x.shape[0]
    return max(0, min(int(call.num_valid_tokens), call.x.shape[0]))


def _padded(y: Tensor, rows: int) -> Tensor:
    """y and zeros for padding, ``[rows, H]``."""
    return y if len(y) == rows else torch.cat((y, y.new_zeros(rows - len(y), y.shape[1])))


def _rows(call: Call, valid: int) -> tuple[int, int]:
    if call.shared_rows is None:
        return 0, valid
    start, end = (int(row) for row in call.shared_rows)
    return max(start, 0), min(end, valid)
