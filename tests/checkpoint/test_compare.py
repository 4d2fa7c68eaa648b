"""A derived checkpoint against its original."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.checkpoint.compare import compare

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor


@pytest.mark.parametrize("kind", ["v4", "glm-fp8", "stacked"])
def test_a_checkpoint_equals_itself(kinds: dict[str, Path], kind: str) -> None:
    found = list(compare(kinds[kind], kinds[kind]))
    assert found
    assert all((d.routed, d.shared, d.problems) == ("equal", "equal", ()) for d in found)


def test_case_1_a_shared_expert_scaled_by_four_tenths_fails(
    kinds: dict[str, Path], changed: Callable[..., Path]
) -> None:
    def scale(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        tensors["model.layers.2.mlp.shared_experts.down_proj.weight_scale_inv"] *= 0.4

    first, second, draft = compare(changed("glm-fp8", scale), kinds["glm-fp8"])
    assert first.ok
    assert draft.ok
    assert second.shared == "different"
    assert second.gain == pytest.approx(0.4)
    assert "down_proj.weight (fp8_128x128, the original is fp8_128x128): RMS 0.600, gain 0.400" in second.problems[0]


def test_a_requantised_and_scaled_shared_expert_fails_too(kinds: dict[str, Path], changed: Callable[..., Path]) -> None:
    def scale(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for matrix in ("w1", "w2", "w3"):
            at = f"layers.0.ffn.shared_experts.{matrix}"
            plain = tensors[f"{at}.weight"].float() * tensors[f"{at}.scale"].float().repeat_interleave(
                128, 0
            ).repeat_interleave(128, 1)
            del tensors[f"{at}.scale"]
            tensors[f"{at}.weight"] = plain.mul(0.4 if matrix == "w2" else 1.0).to(torch.bfloat16)

    first = next(iter(compare(changed("v4", scale), kinds["v4"])))
    assert first.shared == "different"
    assert "more than requantising costs" in first.problems[0]


def test_a_routed_expert_with_one_other_code_is_found(kinds: dict[str, Path], changed: Callable[..., Path]) -> None:
    for kind, name, index in (
        ("v4", "layers.1.ffn.experts.9.w3.weight", (3, 4)),
        ("stacked", "model.layers.1.mlp.experts.w2_weight", (5, 3, 4)),
    ):

        def flip(
            tensors: dict[str, Tensor], config: dict[str, Any], name: str = name, index: tuple[int, ...] = index
        ) -> None:
            tensors[name].view(torch.uint8)[index] ^= 1

        found = [d for d in compare(changed(kind, flip, kind), kinds[kind]) if not d.ok]
        assert [d.routed for d in found] == ["different"]
        assert name in found[0].problems[0]


def test_other_experts_layers_or_layouts_are_problems(kinds: dict[str, Path], changed: Callable[..., Path]) -> None:
    def fewer(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if ".layers.2.mlp.experts.7." in n or ".layers.1." in n]:
            del tensors[name]
        for router in ("model.layers.2.mlp.gate.weight", "model.layers.2.mlp.gate.e_score_correction_bias"):
            if router in tensors:
                tensors[router] = tensors[router][:7].clone()

    one, two = compare(changed("bf16", fewer), kinds["bf16"])
    assert one.problems == ("the derived checkpoint does not have this layer",)
    assert two.problems == ("the two checkpoints do not have the same experts",)

    def narrower(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if ".shared_experts." in n]:
            tensors[name] = tensors[name][:, :32].clone() if "down" in name else tensors[name][:32].clone()

    assert (
        "shape [1, 32, 128], the original's is [1, 64, 128]"
        in next(iter(compare(changed("bf16", narrower, "narrow"), kinds["bf16"]))).problems[0]
    )

    def broken(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        del tensors["model.layers.1.mlp.experts.0.up_proj.weight"]

    damaged = next(iter(compare(changed("bf16", broken, "broken"), kinds["bf16"])))
    assert damaged.problems == ("derived: missing: model.layers.1.mlp.experts.0.up_proj.weight",)

    def stack(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for layer in (1, 2):
            at = f"model.layers.{layer}.mlp.experts"
            for matrix in ("gate_proj", "up_proj", "down_proj"):
                parts = [tensors.pop(f"{at}.{e}.{matrix}.weight") for e in range(8)]
                tensors[f"{at}.{matrix}"] = torch.stack(parts)

    stacked = next(iter(compare(changed("bf16", stack, "stack"), kinds["bf16"])))
    assert stacked.problems == ("one checkpoint stacks its experts, the other does not",)


def test_a_zero_weight_is_compared_without_dividing_by_it(changed: Callable[..., Path]) -> None:
    def zero(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if ".shared_experts." in n]:
            tensors[name].zero_()

    def one(tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        zero(tensors, config)
        tensors["model.layers.1.mlp.shared_experts.up_proj.weight"][0, 0] = 1

    first = next(iter(compare(changed("bf16", one, "one"), changed("bf16", zero, "zero"))))
    assert (first.shared, first.rms) == ("different", 1.0)
