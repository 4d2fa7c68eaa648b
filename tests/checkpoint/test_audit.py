"""Missing, unexpected, doubled, misshapen: one error that lists all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.checkpoint import CheckpointError, OpaqueLayer, find_layer, read_headers, read_layers
from foldmoe.checkpoint.audit import _ranges, audit
from foldmoe.checkpoint.families import collect
from foldmoe.checkpoint.reader import read_layer
from foldmoe.checkpoint.shards import TensorHeader

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

LAYER = "layers.1.ffn"


def error(folder: Path, layer: str = LAYER) -> str:
    """What loading says, after checking that planning says the same."""
    headers = read_headers(folder)
    found = find_layer(read_layers(headers), layer)
    with pytest.raises(CheckpointError) as caught:
        read_layer(headers, found)
    assert isinstance(found.spec, OpaqueLayer)
    assert all(reason in str(caught.value) for reason in found.spec.reasons)
    return str(caught.value)


def test_case_74_missing_and_unexpected_at_once_is_an_error(changed: Callable[..., Path]) -> None:
    def rename(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"{LAYER}.experts.2.gate_proj.weight"] = tensors.pop(f"{LAYER}.experts.2.w1.weight")

    message = error(changed("v4", rename))
    assert f"missing: {LAYER}.experts.2.w1.weight" in message
    assert f"unexpected: {LAYER}.experts.2.gate_proj.weight I8 [128, 128]" in message
    assert message.startswith(f"{LAYER}: 2 problems")


def test_all_problems_stand_in_one_error(changed: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors[f"{LAYER}.experts.0.w2.scale"]
        tensors[f"{LAYER}.experts.5.w3.scale"] = torch.zeros(128, 2, dtype=torch.uint8)
        tensors[f"{LAYER}.experts.7.w9.weight"] = torch.zeros(1)
        for name in [n for n in tensors if n.startswith(f"{LAYER}.experts.15.")]:
            del tensors[name]
        tensors[f"{LAYER}.shared_experts.w1.scale"] = torch.zeros(1, 1, dtype=torch.uint8)

    message = error(changed("v4", spoil))
    for line in (
        f"missing: {LAYER}.experts.0.w2.scale",
        f"wrong shape: {LAYER}.experts.5.w3.scale U8 [128, 2], expected F8_E8M0 [128, 8]",
        f"unexpected: {LAYER}.experts.7.w9.weight F32 [1] fits no role",
        f"missing: experts 15 of 16 under {LAYER}.experts",
        f"not readable: {LAYER}.shared_experts.w1.weight F8_E4M3 [128, 256] with",
    ):
        assert line in message
    assert message.count("\n  ") == 5


def test_case_75_an_empty_set_of_experts_does_not_succeed(changed: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if f"{LAYER}.experts." in n]:
            tensors[name.replace(".experts.", ".experts.expert_")] = tensors.pop(name)

    message = error(changed("v4", spoil))
    assert f"missing: no tensor under {LAYER}.experts is an expert's projection; expected 16" in message
    assert message.count("unexpected:") == 16 * 6


def test_case_18_expert_zero_is_missed_when_it_is_gone(changed: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith(f"{LAYER}.experts.0.")]:
            del tensors[name]

    assert f"missing: experts 0 of 16 under {LAYER}.experts" in error(changed("v4", spoil))


def test_experts_beyond_the_router_are_unexpected(changed: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"{LAYER}.gate.weight"] = tensors[f"{LAYER}.gate.weight"][:14].clone()

    assert f"unexpected: experts 14-15 under {LAYER}.experts, the router knows 14" in error(changed("v4", spoil))


def test_router_tensors_of_another_shape_are_errors_like_any_other(changed: Callable[..., Path]) -> None:
    table = "layers.0.ffn.gate.tid2eid"

    def spoil(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"{LAYER}.gate.weight"] = tensors[f"{LAYER}.gate.weight"][:, 1:].clone()
        tensors[f"{LAYER}.gate.bias"] = torch.zeros(17)
        del tensors[f"{LAYER}.experts.3.w2.scale"]
        tensors[table] = tensors[table].flatten()

    folder = changed("v4", spoil)
    message = error(folder)
    for line in (
        f"wrong shape: {LAYER}.gate.weight BF16 [16, 255], expected [16, 256]",
        f"wrong shape: {LAYER}.gate.bias F32 [17], expected [16]",
        f"missing: {LAYER}.experts.3.w2.scale",
    ):
        assert line in message
    assert message.count("\n  ") == 3
    assert f"wrong shape: {table} I64 [" in error(folder, "layers.0.ffn")


def test_router_vectors_may_have_a_dimension_of_one_more(changed: Callable[..., Path]) -> None:
    def widen(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"{LAYER}.gate.bias"] = torch.zeros(1, 16)

    headers = read_headers(changed("v4", widen))
    assert find_layer(read_layers(headers), LAYER).audit.problems == ()


def test_foreign_formats_are_told_from_damage(changed: Callable[..., Path]) -> None:
    def spoil(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        config["hidden_act"] = "gelu"
        for expert in range(16):
            tensors[f"{LAYER}.experts.{expert}.w1.zeros"] = torch.zeros(1)
        tensors[f"{LAYER}.shared_experts.w1.weight"] = tensors[f"{LAYER}.shared_experts.w1.weight"].view(torch.int32)
        tensors["layers.2.ffn.shared_experts.w1.scale"] = torch.zeros(3, 3, dtype=torch.uint8)

    layers = read_layers(read_headers(changed("v4", spoil)))
    foreign, damaged = (find_layer(layers, name).spec for name in (LAYER, "layers.2.ffn"))
    assert isinstance(foreign, OpaqueLayer)
    assert isinstance(damaged, OpaqueLayer)
    assert foreign.damage == ()
    assert [reason.partition(" ")[0] for reason in damaged.damage] == ["not"]
    assert len(damaged.reasons) == 2


def test_case_33_a_scale_table_four_times_too_narrow_is_an_error(changed: Callable[..., Path]) -> None:
    def narrow(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if f"{LAYER}.experts." in n and n.endswith(".scale")]:
            scales = tensors[name].view(torch.uint8)
            tensors[name] = scales[:, : max(1, scales.shape[1] // 4)].clone()

    message = error(changed("v4", narrow))
    assert "U8 [128, 2]" in message or "U8 [256, 1]" in message
    assert "expected one of: mxfp4" in message


def test_a_config_that_states_a_shared_expert_the_layer_lacks_is_an_error(changed: Callable[..., Path]) -> None:
    def drop(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if f"{LAYER}.shared_experts." in n]:
            del tensors[name]

    assert "missing: config.json states a shared expert" in error(changed("v4", drop))


def test_half_a_shared_expert_is_an_error(changed: Callable[..., Path]) -> None:
    for matrix, what in (("w1", "gate (w1, gate_proj)"), ("w3", "up (w3, up_proj)"), ("w2", "down projection")):

        def drop(tensors: dict[str, Tensor], config: dict[str, Any], matrix: str = matrix) -> None:
            del tensors[f"{LAYER}.shared_experts.{matrix}.weight"]
            del tensors[f"{LAYER}.shared_experts.{matrix}.scale"]

        assert what in error(changed("v4", drop, matrix))


def test_stacks_must_agree_with_each_other_and_the_router(changed: Callable[..., Path]) -> None:
    name = "model.layers.0.mlp"

    def short(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors[f"{name}.experts.w2_weight"] = tensors[f"{name}.experts.w2_weight"][:7].clone()

    message = error(changed("stacked", short), name)
    assert f"wrong shape: {name}.experts.w2_weight U8 [7, 128, 32] stacks 7 experts, expected 8" in message


def test_stacked_and_single_experts_together_are_ambiguous(changed: Callable[..., Path]) -> None:
    name = "model.layers.0.mlp"

    def both(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for expert in range(8):
            tensors[f"{name}.experts.{expert}.w1.weight"] = torch.zeros(64, 128)

    assert "stacks experts that are also stored one by one" in error(changed("stacked", both), name)


def headers_of(**shapes: tuple[str, tuple[int, ...]]) -> dict[str, TensorHeader]:
    return {f"l.layers.0.mlp.{n.replace('__', '.')}": TensorHeader(d, s, "x") for n, (d, s) in shapes.items()}


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (
            headers_of(experts__gate_up_proj=("BF16", (4, 32, 128)), experts__down_proj=("BF16", (4, 64, 32))),
            "stored transposed, which is not read here",
        ),
        (
            headers_of(experts__gate_up_proj=("BF16", (4, 96, 32)), experts__down_proj=("BF16", (4, 32, 64))),
            "expected [128, 32]",
        ),
        (
            headers_of(
                experts__gate_up_proj=("BF16", (4, 64, 64)), experts__down_proj=("BF16", (4, 64, 32)),
                experts__gate_up_proj_bias=("BF16", (4, 64)),
            ),
            "('bias') is not known here",
        ),
        (
            headers_of(experts__gate_up_proj=("BF16", (64, 64)), experts__down_proj=("BF16", (4, 64, 32))),
            "expected 3 dimensions",
        ),
        (
            headers_of(
                experts__gate_up_proj=("BF16", (4, 64, 64)), experts__down_proj=("F8_E4M3", (4, 64, 32)),
                experts__down_proj_scale_inv=("F32", (4, 1, 1)),
            ),
            "the projections of one expert must agree",
        ),
        (
            headers_of(
                experts__gate_up_proj=("F8_E4M3", (4, 64, 64)), experts__down_proj=("F8_E4M3", (4, 64, 32)),
                experts__down_proj_scale_inv=("F32", (4, 1, 1)), experts__gate_up_proj_scale_inv=("F32", (1, 1)),
            ),
            "expected 3 dimensions",
        ),
        (
            headers_of(experts__gate_up_proj=("F8_E4M3FNUZ", (4, 64, 64)), experts__down_proj=("BF16", (4, 64, 32))),
            "no format of ours uses this dtype",
        ),
        (
            headers_of(
                experts__0__w1__weight=("U8", (32, 32)), experts__0__w3__weight=("U8", (32, 32)),
                experts__0__w2__weight=("U8", (64, 16)), experts__0__w1__scale=("F8_E4M3", (32, 4)),
                experts__0__w3__scale=("F8_E4M3", (32, 4)), experts__0__w2__scale=("F8_E4M3", (64, 2)),
            ),
            "nvfp4 needs a weight_scale_2",
        ),
        (
            headers_of(
                experts__0__w1__weight=("BF16", (32, 64)), experts__0__w3__weight=("BF16", (32, 64)),
                experts__0__gate_up_proj__weight=("BF16", (64, 64)), experts__0__w2__weight=("BF16", (64, 32)),
            ),
            "stand both alone and stacked",
        ),
    ],
)  # fmt: skip
def test_shapes_that_do_not_belong_together(tensors: dict[str, TensorHeader], problem: str) -> None:
    (block,) = collect(tensors)
    assert any(problem in found for found in audit(block, tensors).problems), audit(block, tensors).problems


def test_ranges_of_missing_experts_are_short() -> None:
    assert _ranges([0, 1, 2, 7, 9, 10]) == "0-2, 7, 9-10"
