"""Run under ``TRITON_INTERPRET=1`` by ``test_combine.py``: the weighted sum and the gated activation against torch."""

import torch

from foldmoe.bench.peers.combine import weighted_sum
from foldmoe.bench.peers.gated import silu_and_mul
from foldmoe.moe import Activation
from tests.triton.interpreted import patch


def main() -> None:
    patch.apply()
    torch.manual_seed(0)
    for tokens, top_k, hidden in ((1, 6, 1024), (3, 2, 1500), (2, 1, 64)):
        routed = torch.randn(tokens * top_k, hidden).to(torch.bfloat16)
        weights, shared = torch.rand(tokens, top_k), torch.randn(tokens, hidden)
        wanted = shared.double() + (routed.double().view(tokens, top_k, -1) * weights.double()[..., None]).sum(1)
        found = weighted_sum(routed, weights, shared)
        assert float((found.double() - wanted).norm() / wanted.norm()) < 1e-6, (tokens, top_k, hidden)
    for tokens, width, limit in ((1, 1024, None), (3, 1500, 0.5), (2, 64, 10.0)):
        gate_up = torch.randn(tokens, 2 * width)
        found = silu_and_mul(gate_up, limit)
        assert torch.allclose(found, Activation(limit)(*gate_up.chunk(2, dim=-1)), rtol=1e-5, atol=1e-6), (width, limit)


if __name__ == "__main__":
    main()
