"""Widths that no scale block divides: a plan from headers says what a plan from the tensors says, bytes included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe import Activation, FoldedMoE, Format, FusionPolicy, load_layer, plan_checkpoint
from foldmoe.checkpoint.generate import write
from foldmoe.checkpoint.generate.experts import Geometry, MoERecipe, Storage, moe_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from foldmoe.planner.policy import Fold

BLOCK = "model.layers.0.mlp"
FP8, SMALL_FP8, MXFP4 = Format.FP8_128x128, Format.FP8_32x32, Format.MXFP4
WIDTHS = [
    (FP8, FP8, 256, 192),
    (FP8, FP8, 192, 192),
    (FP8, FP8, 256, 256),
    (FP8, FP8, 160, 96),
    (MXFP4, FP8, 192, 320),
    (MXFP4, SMALL_FP8, 64, 80),
]


@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize(("routed", "shared", "width", "shared_width"), WIDTHS)
def test_headers_and_tensors_give_one_plan_and_its_bytes_are_true(
    tmp_path: Path, routed: Format, shared: Format, width: int, shared_width: int, fold: Fold
) -> None:
    recipe = MoERecipe(Geometry(128, width, 4, 2, shared_width=shared_width), Storage(routed), Storage(shared))
    named = list(moe_tensors(BLOCK, recipe, torch.Generator().manual_seed(0)))
    config = {
        "num_experts_per_tok": 2, "num_hidden_layers": 1, "n_routed_experts": 4, "hidden_act": "silu",
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    }  # fmt: skip
    write(tmp_path, config, named)
    policy = FusionPolicy(fold, backend="torch")
    planned = plan_checkpoint(tmp_path, policy=policy, device="cpu").layers[0]
    layer = load_layer(tmp_path, 0, policy=policy, device="cpu")
    weights = load_layer(tmp_path, 0, policy=FusionPolicy("native", backend="torch"), device="cpu").unpack()
    again = FoldedMoE(*weights, activation=Activation(), policy=policy, top_k=2)
    assert (planned.strategy, planned.padded_width) == (again.plan.strategy, again.plan.padded_width)
    assert planned.bytes_before == again.plan.bytes_before == sum(w.nbytes for w in weights if w)
    assert planned.bytes_after == layer.memory()["weights"] == again.memory()["weights"]
    tensors = layer.checkpoint_tensors()
    assert all(
        torch.equal(tensors[name].view(torch.uint8), t.view(torch.uint8)) for name, t in named if "expert" in name
    )
