"""Widths that no scale block divides: a plan from headers says what a plan from the tensors says, bytes included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe import Activation, FoldedMoE, Format, FusionPolicy, Placement, load_layer, plan_checkpoint
from foldmoe.checkpoint.generate import write
from foldmoe.checkpoint.generate.experts import Geometry, MoERecipe, Storage, moe_tensors

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from foldmoe.planner.policy import Fold

BLOCK = "model.layers.0.mlp"
FP8, SMALL_FP8, MXFP4, NVFP4 = Format.FP8_128x128, Format.FP8_32x32, Format.MXFP4, Format.NVFP4
WIDTHS = [
    (FP8, FP8, 256, 192),
    (FP8, FP8, 192, 192),
    (FP8, FP8, 256, 256),
    (FP8, FP8, 160, 96),
    (MXFP4, FP8, 192, 320),
    (MXFP4, SMALL_FP8, 64, 80),
]


CUTS = [
    *((FP8, FP8, 256, narrow) for narrow in (256, 192, 128, 64)),
    *((MXFP4, MXFP4, 192, narrow) for narrow in (192, 128, 96)),
    *((NVFP4, NVFP4, 192, narrow) for narrow in (192, 48)),
    *((MXFP4, FP8, 192, narrow) for narrow in (192, 96)),
    (Format.BF16, Format.BF16, 192, 48),
]


def write_layer(folder: Path, routed: tuple[Format, int], shared: tuple[Format, int]) -> list[tuple[str, Tensor]]:
    """A checkpoint of one layer, its sets by format and width; returns its tensors by name."""
    geometry = Geometry(128, routed[1], 4, 2, shared_width=shared[1])
    recipe = MoERecipe(geometry, Storage(routed[0]), Storage(shared[0]))
    named = list(moe_tensors(BLOCK, recipe, torch.Generator().manual_seed(0)))
    config = {
        "num_experts_per_tok": 2, "num_hidden_layers": 1, "n_routed_experts": 4, "hidden_act": "silu",
        "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    }  # fmt: skip
    write(folder, config, named)
    return named


@pytest.mark.parametrize("fold", ["native", "slot"])
@pytest.mark.parametrize(("routed", "shared", "width", "shared_width"), WIDTHS)
def test_headers_and_tensors_give_one_plan_and_its_bytes_are_true(
    tmp_path: Path, routed: Format, shared: Format, width: int, shared_width: int, fold: Fold
) -> None:
    named = write_layer(tmp_path, (routed, width), (shared, shared_width))
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


@pytest.mark.parametrize(("routed", "shared", "width", "shared_width"), CUTS)
def test_a_slot_that_is_planned_is_loaded_on_every_cut(
    tmp_path: Path, routed: Format, shared: Format, width: int, shared_width: int
) -> None:
    write_layer(tmp_path, (routed, width), (shared, shared_width))
    policy = FusionPolicy("slot", allow_requantize=True, backend="torch")
    for ranks in (1, 2, 3, 4, 8):
        planned = plan_checkpoint(tmp_path, policy=policy, tp_size=ranks, device="cpu").layers[0]
        if planned.arm == "stock":
            assert "does not cut into" in planned.reasons[0]
            continue
        layer = load_layer(tmp_path, 0, policy=policy, placement=Placement(1, 0, ranks, ranks - 1), device="cpu")
        assert (layer.plan.digest, layer.plan.reasons) == (planned.digest, planned.reasons)
        assert layer.memory()["weights"] == planned.bytes_after
        if planned.strategy == "serial":
            assert "slot: stored differently" in planned.reasons[-1]
