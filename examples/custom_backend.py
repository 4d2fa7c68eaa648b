"""A backend of one's own: every expert as plain float32 matrices, run for all tokens, weighed by a mask.

It shows the contract, not speed: say what runs (``supports``), pack, run, and give back the stored bits.
"""

import torch

from foldmoe import ExpertWeights, FoldedMoE, Format, FusionPolicy, QuantizedTensor, reference_moe
from foldmoe.backends import Backend, Call, PackedLayer, register
from foldmoe.reference import relative_error


class DenseLayer(PackedLayer):
    """Dequantised experts, and the stored ones for ``unpack``."""

    def __init__(self, routed, shared, activation, shared_activation):
        self.stored, self.acts = (routed, shared), (activation, shared_activation)
        self.experts = [[t.dequantize() for t in (w.gate_up, w.down)] if w else None for w in self.stored]

    def _run(self, which: int, expert: int, x: torch.Tensor) -> torch.Tensor:
        up, down = (matrix[expert] for matrix in self.experts[which])
        return self.acts[which](*(x @ up.T).chunk(2, dim=-1)) @ down.T

    @staticmethod
    def _zero_padding(call: Call, y: torch.Tensor) -> torch.Tensor:
        live = len(y) if call.num_valid_tokens is None else int(call.num_valid_tokens)
        return y.masked_fill((torch.arange(len(y)) >= live)[:, None], 0.0)  # whatever stood there, NaN included

    def forward(self, call: Call, *, folded: bool) -> torch.Tensor:
        x, y = call.x.float(), self.forward_shared(call)
        for expert in range(self.stored[0].num_experts):
            weight = torch.where(call.topk_ids == expert, call.topk_weights, 0.0).sum(1, keepdim=True)
            y += self._run(0, expert, x) * weight * call.routed_scale
        return self._zero_padding(call, y).to(call.x.dtype)

    def forward_shared(self, call: Call) -> torch.Tensor:
        start, end = (0, len(call.x)) if call.shared_rows is None else (int(row) for row in call.shared_rows)
        y = torch.zeros(call.x.shape)
        if self.stored[1] is not None:
            gate = 1.0 if call.shared_weights is None else call.shared_weights[start:end, None]
            y[start:end] = self._run(1, 0, call.x[start:end].float()) * gate
        return self._zero_padding(call, y)

    def unpack(self):
        return self.stored

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in self.stored if w) + sum(t.nbytes for pair in self.experts if pair for t in pair)


class DenseBackend(Backend):
    """Plain matrices on a CPU."""

    name, deterministic = "dense", False

    def unavailable(self, device):
        return None if device.kind == "cpu" else f"needs a CPU, found {device.name}"

    def supports(self, spec, activations):
        return () if activations == "bf16" else (f"activations {activations}: this example quantises none",)

    def pack(self, routed, shared, *, activation, shared_activation, activations, consume=False):
        return DenseLayer(routed, shared, activation, shared_activation)


register(DenseBackend())

if __name__ == "__main__":
    routed, shared = (
        ExpertWeights(
            *(QuantizedTensor(torch.randn(n, *size) / 8, format=Format.BF16) for size in ((64, 64), (64, 32)))
        )
        for n in (4, 1)
    )
    moe = FoldedMoE(routed, shared, policy=FusionPolicy("native", backend="dense"))
    x, (weights, ids) = torch.randn(5, 64), torch.rand(5, 4).topk(2)
    print(moe.plan, f"error {relative_error(moe(x, ids, weights), reference_moe(x, ids, weights, routed, shared)):.1e}")
