"""Every MoE layer of a checkpoint planned from headers: what folds, what does not, why, and at which cost."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from foldmoe import FusionPolicy, plan_checkpoint
from foldmoe.checkpoint import CheckpointError
from foldmoe.checkpoint.generate import generate
from foldmoe.planner import CheckpointPlan, LayerPlan, StockLayer
from tests.support.sparse import Fact, expert, v4_layer, write_header

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = {
    "num_experts_per_tok": 2, "num_hidden_layers": 9, "expert_dtype": "fp4", "hidden_act": "silu",
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}  # fmt: skip


def checkpoint(folder: Path, layers: dict[str, list[Fact]], **config: object) -> Path:
    for number, facts in enumerate(layers.values()):
        write_header(folder / f"{number}.safetensors", facts)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return folder


def v4(folder: Path, count: int = 3, experts: int = 6, **config: object) -> Path:
    names = [f"layers.{n}.ffn" for n in range(count)]
    return checkpoint(folder, {name: v4_layer(name, 256, 192, experts, 128) for name in names}, **config)


def test_all_layers_fold_natively_at_no_cost(tmp_path: Path) -> None:
    plan = plan_checkpoint(v4(tmp_path), device="cpu")
    assert plan.summary == "3/3 layers fold natively, +0 B"
    assert [p.strategy for p in plan.layers] == ["native"] * 3
    assert plan.bytes_before == plan.bytes_after == sum(p.spec.nbytes for p in plan.layers)
    assert plan.stock == ()


def test_case_93_every_refusal_has_its_reason(tmp_path: Path) -> None:
    plan = plan_checkpoint(v4(tmp_path), policy=FusionPolicy(fold="slot"), device="cpu")
    assert plan.summary == "3/3 layers do not fold, +0 B"
    for layer in plan.layers:
        assert layer.arm == "serial"
        assert any("fp8_128x128 -> mxfp4 lowers precision; ask for it by name" in reason for reason in layer.reasons)


def test_requantising_happens_only_when_asked_by_name(tmp_path: Path) -> None:
    policy = FusionPolicy(fold="slot", allow_requantize=True)
    plan = plan_checkpoint(v4(tmp_path), policy=policy, device="cpu")
    assert plan.summary.startswith("3/3 layers fold into a slot, -")
    assert all(p.requantize for p in plan.layers)
    assert plan.extra_bytes < 0
    assert plan_checkpoint(tmp_path, device="cpu").layers[0].requantize is False


def test_case_41_mixed_layers_are_decided_one_by_one(tmp_path: Path) -> None:
    facts = {f"layers.{n}.ffn": v4_layer(f"layers.{n}.ffn", 256, 192, 6, 128) for n in range(3)}
    routed_format = expert("layers.1.ffn.shared_experts", 256, 192)
    facts["layers.1.ffn"] = [f for f in facts["layers.1.ffn"] if ".shared_experts." not in f[0]] + routed_format
    plan = plan_checkpoint(checkpoint(tmp_path, facts), policy=FusionPolicy(fold="slot"), device="cpu")
    assert [p.strategy for p in plan.layers] == ["serial", "slot", "serial"]
    assert plan.summary == "1/3 layers fold into a slot, 2/3 do not fold, +0 B"


def test_a_layer_that_is_not_read_stays_with_the_engine_and_says_why(tmp_path: Path) -> None:
    generate("kimi-int4", tmp_path / "kimi")
    plan = plan_checkpoint(tmp_path / "kimi", device="cpu")
    (layer,) = plan.stock
    assert (layer.arm, layer.backend, layer.strategy, layer.folded) == ("stock", "stock", "serial", False)
    assert "weight_packed I32" in layer.reasons[0]
    assert plan.layers == ()
    assert plan.summary == "1/1 layers do not fold, +0 B"
    found = plan.as_dict()["layers"][0]
    assert (found["layer"], found["arm"], found["digest"]) == ("model.layers.1.mlp", "stock", layer.digest)
    assert found["stored_bytes"] > 0


def test_bytes_are_those_of_the_rank_that_holds_the_most(tmp_path: Path) -> None:
    whole = plan_checkpoint(v4(tmp_path), device="cpu").layers[0].spec
    routed, shared = whole.routed.nbytes(256), whole.shared.nbytes(256)  # type: ignore[union-attr]
    plan = plan_checkpoint(tmp_path, ep_size=4, device="cpu")
    assert [p.bytes_before for p in plan.layers] == [2 * routed + shared] * 3  # 6 experts on 4 ranks: 2, 2, 1, 1
    halves = plan_checkpoint(tmp_path, tp_size=2, device="cpu")
    assert halves.layers[0].folded
    assert 0.5 <= halves.bytes_before / (3 * whole.nbytes) < 0.51


def test_case_50_a_width_that_does_not_divide_is_refused_with_the_reason(tmp_path: Path) -> None:
    plan = plan_checkpoint(v4(tmp_path), tp_size=5, device="cpu")
    assert all("a width of 192 does not cut into 5" in p.reasons[0] for p in plan.layers)
    assert plan_checkpoint(tmp_path, tp_size=3, device="cpu").summary.startswith("3/3 layers fold natively")


def test_the_digest_covers_every_decision_and_nothing_else(tmp_path: Path) -> None:
    one = plan_checkpoint(v4(tmp_path), device="cpu")
    assert one.digest == plan_checkpoint(tmp_path, device="cpu").digest
    assert one.digest == replace(one, notes=("said by one rank alone",), source="elsewhere").digest
    for other in (
        plan_checkpoint(tmp_path, device="cpu", policy=FusionPolicy(fold="off")),
        plan_checkpoint(tmp_path, device="cpu", ep_size=2),
        plan_checkpoint(tmp_path, device="cpu", policy=FusionPolicy(activations="bf16")),
    ):
        assert other.digest != one.digest
    assert replace(one, rows=one.rows[:2]).digest != one.digest


def test_json_holds_what_the_table_shows(tmp_path: Path) -> None:
    plan = plan_checkpoint(v4(tmp_path), ep_size=2, tp_size=2, device="h200")
    found = json.loads(json.dumps(plan.as_dict()))
    assert (found["device"], found["ep_size"], found["tp_size"]) == ("h200", 2, 2)
    assert (found["summary"], found["digest"]) == (plan.summary, plan.digest)
    assert [layer["layer"] for layer in found["layers"]] == [p.layer for p in plan.layers]
    assert found["layers"][0]["routed"] == "6x192 mxfp4"


def test_layers_are_found_by_name(tmp_path: Path) -> None:
    plan = plan_checkpoint(v4(tmp_path), device="cpu")
    assert plan.layer("layers.1.ffn") is plan.layers[1]
    with pytest.raises(KeyError, match=r"no planned layer 'layers\.9\.ffn'"):
        plan.layer("layers.9.ffn")


def test_notes_about_index_and_shards_travel_with_the_plan(tmp_path: Path) -> None:
    plan = plan_checkpoint(v4(tmp_path), device="cpu")
    assert any("model.safetensors.index.json is missing" in note for note in plan.notes)
    assert plan.as_dict()["notes"] == list(plan.notes)


def test_a_checkpoint_without_moe_layers_has_nothing_to_fold(tmp_path: Path) -> None:
    write_header(tmp_path / "a.safetensors", [("model.layers.0.mlp.up_proj.weight", "BF16", (4, 4))])
    plan = plan_checkpoint(tmp_path, device="cpu")
    assert plan.summary == "no MoE layers: nothing to fold"
    assert plan.rows == ()


@pytest.mark.parametrize(("ep", "tp"), [(0, 1), (1, 0)])
def test_sizes_below_one_are_refused(tmp_path: Path, ep: int, tp: int) -> None:
    with pytest.raises(ValueError, match="_size 0"):
        plan_checkpoint(v4(tmp_path), ep_size=ep, tp_size=tp, device="cpu")


def test_what_cannot_be_read_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        plan_checkpoint(tmp_path, device="cpu")
    with pytest.raises(ValueError, match="unknown device 'h900'"):
        plan_checkpoint(v4(tmp_path), device="h900")


def test_case_8_the_plan_a_loader_gets_is_the_plan_that_was_shown(tmp_path: Path) -> None:
    from foldmoe import load_layer

    generate("bf16", tmp_path / "bf16")
    plan: CheckpointPlan = plan_checkpoint(tmp_path / "bf16", device="cpu")
    for row in plan.rows:
        assert not isinstance(row, StockLayer)
        loaded: LayerPlan = load_layer(tmp_path / "bf16", row.layer, device="cpu").plan
        assert loaded.digest == row.digest


@pytest.mark.parametrize("device", ["h200", "a100"])
def test_float16_layers_are_planned_where_they_run(tmp_path: Path, device: str) -> None:
    """GPU kernels multiply bfloat16, which the header tells before anything is packed."""
    facts = [
        (f"model.layers.0.mlp.{who}.{part}_proj.weight", "F16", (256, 64) if part == "down" else (64, 256))
        for who in ("experts.0", "experts.1", "shared_experts")
        for part in ("gate", "up", "down")
    ]
    plan = plan_checkpoint(checkpoint(tmp_path, {"half": facts}), device=device).layers[0]
    assert (plan.strategy, plan.backend) == ("native", "torch")
    assert sum("in float16" in reason for reason in plan.reasons) >= 2
