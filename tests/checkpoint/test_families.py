"""Names to roles: every family's, under any prefix."""

from __future__ import annotations

import pytest

from foldmoe.checkpoint.families import Slot, collect, slot_of


@pytest.mark.parametrize(
    ("leaf", "matrix", "kind"),
    [
        ("w1.weight", "gate", "values"), ("w3.scale", "up", "scales"), ("w2.weight", "down", "values"),
        ("gate_proj.weight_scale_inv", "gate", "scales"), ("up_proj.weight_packed", "up", "values"),
        ("down_proj.weight_scale_2", "down", "global_scale"), ("gate_up_proj", "gate_up", "values"),
        ("gate_up_proj_scale_inv", "gate_up", "scales"), ("w13_weight", "gate_up", "values"),
        ("w2_weight_scale", "down", "scales"), ("down_proj.input_scale", "down", "input_scale"),
        ("gate_up_proj_blocks", "gate_up", "?blocks"), ("w1.weight_shape", "gate", "?weight_shape"),
    ],
)  # fmt: skip
def test_the_last_part_of_a_name_says_matrix_and_kind(leaf: str, matrix: str, kind: str) -> None:
    slot = slot_of(leaf)
    assert slot == Slot(matrix, kind)  # type: ignore[arg-type]
    assert slot.known is not kind.startswith("?")


def test_a_name_that_is_no_projection_has_no_slot() -> None:
    assert slot_of("w4.weight") is None
    assert slot_of("norm.weight") is None


@pytest.mark.parametrize(
    ("block", "index", "draft"),
    [
        ("layers.3.ffn", 3, False), ("model.layers.12.mlp", 12, False), ("model.language_model.layers.7.mlp", 7, False),
        ("language_model.model.layers.0.block_sparse_moe", 0, False), ("mtp.1.ffn", 1, True),
        ("mtp.layers.0.mlp", 0, True), ("model.layers.2.feed_forward", 2, False),
    ],
)  # fmt: skip
def test_any_prefix_may_stand_in_front(block: str, index: int, draft: bool) -> None:
    (found,) = collect([f"{block}.experts.0.w1.weight", f"{block}.gate.weight", f"{block}.shared_experts.w1.weight"])
    assert (found.name, found.index, found.in_draft) == (block, index, draft)
    assert found.router == {"weight": f"{block}.gate.weight"}
    assert found.shared == {Slot("gate", "values"): f"{block}.shared_experts.w1.weight"}


def test_case_18_expert_zero_is_an_expert_like_any_other() -> None:
    (found,) = collect(["layers.0.ffn.experts.0.w1.weight"])
    assert found.experts == {0: {Slot("gate", "values"): "layers.0.ffn.experts.0.w1.weight"}}
    assert found.has_experts


def test_router_roles_of_all_families() -> None:
    names = {
        "layers.0.ffn.gate.bias": "bias", "layers.0.ffn.gate.bias_vl": "image_bias",
        "layers.0.ffn.gate.tid2eid": "table", "layers.0.ffn.gate.weight": "weight",
        "layers.0.ffn.shared_expert_gate.weight": "shared_gate",
    }  # fmt: skip
    (found,) = collect(["layers.0.ffn.experts.0.w1.weight", *names])
    assert found.router == {role: name for name, role in names.items()}
    for bias in ("gate.e_score_correction_bias", "e_score_correction_bias", "experts.e_score_correction_bias"):
        (found,) = collect(["layers.0.mlp.experts.0.w1.weight", f"layers.0.mlp.{bias}"])
        assert found.router == {"bias": f"layers.0.mlp.{bias}"}


def test_dense_layers_and_attention_gates_are_no_moe_blocks() -> None:
    names = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.self_attn.gate.weight", "model.norm.weight"]
    assert collect(names) == []


def test_a_layer_that_lost_its_experts_is_kept() -> None:
    whole = ["model.layers.1.mlp.experts.0.w1.weight", "model.layers.1.mlp.gate.weight"]
    router, shared = "model.layers.2.mlp.gate.weight", "model.layers.3.mlp.shared_expert.w1.weight"
    attention = "model.layers.2.self_attn.gate.weight"
    found = collect([*whole, router, shared, attention])
    assert [b.name for b in found] == [f"model.layers.{i}.mlp" for i in (1, 2, 3)]
    assert [b.has_experts for b in found] == [True, False, False]


def test_a_shared_expert_beside_the_block_of_its_experts_is_no_layer_of_its_own() -> None:
    for experts in ("model.layers.1.mlp.moe", "model.layers.1.block_sparse_moe", "model.layers.1"):
        found = collect([f"{experts}.experts.0.w1.weight", "model.layers.1.mlp.shared_expert.w1.weight"])
        assert [b.name for b in found] == [experts]


def test_main_layers_come_first_in_order_then_drafts() -> None:
    blocks = ["mtp.0.ffn", "layers.10.ffn", "layers.2.ffn"]
    found = collect([f"{b}.experts.0.w1.weight" for b in blocks])
    assert [b.name for b in found] == ["layers.2.ffn", "layers.10.ffn", "mtp.0.ffn"]


def test_two_names_for_one_role_and_unknown_names_are_strange() -> None:
    at = "layers.0.ffn.experts.0"
    names = [f"{at}.w1.weight", f"{at}.gate_proj.weight", f"{at}.w4.weight", "layers.0.ffn.shared_experts.norm.weight"]
    (found,) = collect(names)
    assert found.strange == names[1:]
    assert sorted(found.names()) == sorted(names)
