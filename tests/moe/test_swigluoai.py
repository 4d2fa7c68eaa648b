"""The other activation, through the layer: against the oracle, planned where it runs, padded without a change."""

from __future__ import annotations

import pytest
import torch

from foldmoe import FoldedMoE, FusionPolicy, plan_checkpoint
from foldmoe.checkpoint.generate import generate
from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import Activation, ExpertWeights
from foldmoe.moe.spec import ExpertSpec, LayerSpec
from foldmoe.planner import plan_layer
from foldmoe.reference import reference_moe, relative_error

OAI = Activation(7.0, 1.702, 1.0)


def experts(count: int, width: int, hidden: int, seed: int) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)

    def part(rows: int, columns: int) -> QuantizedTensor:
        values = torch.randn(count, rows, columns, generator=generator) * 3 / columns**0.5
        return QuantizedTensor(values.to(torch.bfloat16), None, format=Format.BF16)

    return ExpertWeights(part(2 * width, hidden), part(hidden, width))


@pytest.mark.parametrize("fold", ["native", "off", "slot"])
def test_layer_matches_the_oracle(fold: str) -> None:
    routed, shared = experts(4, 96, 128, 0), experts(1, 96, 128, 1)
    policy = FusionPolicy(fold, backend="torch")  # type: ignore[arg-type]
    layer = FoldedMoE(routed, shared, activation=OAI, policy=policy)
    x = torch.randn(9, 128) * 4
    ids = torch.randint(-1, 4, (9, 2))
    weights = torch.rand(9, 2)
    want = reference_moe(x, ids, weights, routed, shared, activation=OAI, shared_activation=OAI)
    assert relative_error(layer(x, ids, weights), want) < 1e-5
    plain = reference_moe(x, ids, weights, routed, shared)
    assert relative_error(plain, want) > 0.1  # another function, not a variant within tolerance


def test_gpus_leave_it_to_torch_with_the_reason() -> None:
    spec = LayerSpec("l", 256, 2, ExpertSpec(8, 128, Format.MXFP8), ExpertSpec(1, 128, Format.MXFP8), OAI, OAI)
    plan = plan_layer(spec, device="h200")
    assert plan.backend == "torch"
    assert any("silu(gate) * up" in reason and reason.startswith("triton: ") for reason in plan.reasons)


def test_minimax_folds(tmp_path) -> None:
    folder = generate("minimax-mxfp8", tmp_path / "m")
    assert plan_checkpoint(folder, device="cpu").summary == "2/2 layers fold natively, +0 B"
