"""config.json's values: read where they make sense, refused by file and key where they do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from foldmoe import plan_checkpoint
from foldmoe.checkpoint import CheckpointError
from foldmoe.checkpoint.config import ModelFacts
from foldmoe.moe import Activation

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("swiglu_limit", "10", "a finite number of at least 0"),
        ("swiglu_limit", -1, "a finite number of at least 0"),
        ("swiglu_limit", float("nan"), "a finite number of at least 0"),
        ("routed_scaling_factor", [1], "a finite number above 0"),
        ("routed_scaling_factor", "abc", "a finite number above 0"),
        ("routed_scaling_factor", 0.0, "a finite number above 0"),
        ("routed_scaling_factor", True, "a finite number above 0"),
        ("expert_dtype", 4, "text"),
        ("scoring_func", 1, "text"),
        ("num_experts_per_tok", 0, "a whole number of at least 1"),
        ("num_experts_per_tok", -1, "a whole number of at least 1"),
        ("num_experts_per_tok", "4", "a whole number of at least 1"),
        ("num_experts_per_tok", 1.5, "a whole number of at least 1"),
        ("n_routed_experts", -16, "a whole number of at least 0"),
        ("hidden_size", "256", "a whole number of at least 0"),
        ("n_group", -1, "a whole number of at least 0"),
    ],
)
def test_a_value_that_cannot_be_is_named_with_file_and_key(
    changed: Callable[..., Path], key: str, value: Any, expected: str
) -> None:
    folder = changed("v4", lambda tensors, config: config.update({key: value}))
    with pytest.raises(CheckpointError) as caught:
        plan_checkpoint(folder, device="cpu")
    assert str(caught.value) == f"{folder}/config.json: {key} is {value!r}, expected {expected}"


def test_null_zero_and_lists_say_nothing() -> None:
    assert ModelFacts.of({"num_experts_per_tok": None, "swiglu_limit": 0, "expert_dtype": None}) == ModelFacts()
    assert ModelFacts.of({"num_local_experts": 0, "num_experts_per_tok": 0}) == ModelFacts(experts=0)
    assert ModelFacts.of({"moe_topk": [8, 8], "moe_intermediate_size": [3072, 3072]}) == ModelFacts()
    facts = ModelFacts.of({"swiglu_limit": 10, "routed_scaling_factor": 2, "num_experts": 4, "moe_topk": 2})
    assert facts == ModelFacts(activation=Activation(10.0), routed_scale=2.0, experts=4, top_k=2)


def test_keys_of_ernie() -> None:
    transformers = pytest.importorskip("transformers", reason="NOT CHECKED: Ernie's config is Transformers'")
    facts = ModelFacts.of(transformers.Ernie4_5_MoeConfig(moe_k=6, moe_num_shared_experts=2).to_dict())
    assert (facts.experts, facts.top_k, facts.width, facts.shared_width) == (64, 6, 1536, 3072)
