"""Run under ``TRITON_INTERPRET=1`` by ``test_combine.py``: the weighted sum against torch."""

import torch

from foldmoe.bench.peers.combine import weighted_sum
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


if __name__ == "__main__":
    main()
