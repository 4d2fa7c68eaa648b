"""What unfolding gives back, and what becomes of a folded model that is saved, copied or moved."""

from __future__ import annotations

import copy
import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from foldmoe import FusionPolicy
from foldmoe.checkpoint import CheckpointError
from foldmoe.demo import TINY_V4

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")

from foldmoe.integrations.transformers import FoldedBlock, fold, load, unfold  # noqa: E402
from tests.integrations.test_transformers import FAMILIES, build, logits  # noqa: E402


def facts(model: nn.Module) -> dict[str, tuple[torch.dtype, bool, torch.Size]]:
    return {name: (p.dtype, p.requires_grad, p.shape) for name, p in model.named_parameters()}


def with_float32_router(family: str) -> Any:
    """A bf16 model as ``from_config`` builds it: these classes keep their router in float32."""
    stem, options = FAMILIES[family]
    config = getattr(transformers, f"{stem}Config")(**options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert model.model.layers[1].mlp.gate.weight.dtype == torch.float32
    return model


@pytest.mark.parametrize("family", ["glm", "deepseek_v3"])
@pytest.mark.parametrize("how", ["native", "slot"])
def test_bf16_experts_come_back_in_bf16_beside_a_float32_router(family: str, how: Any) -> None:
    model = with_float32_router(family)
    before, known = logits(model), facts(model)
    fold(model, FusionPolicy(how), quiet=True)
    assert unfold(model) == 3
    assert facts(model) == known
    assert torch.equal(logits(model), before)


def test_frozen_experts_come_back_frozen() -> None:
    model = build("glm")
    model.model.layers[1].mlp.shared_experts.requires_grad_(False)
    known = facts(model)
    assert {grad for _, grad, _ in known.values()} == {True, False}
    fold(model, quiet=True)
    unfold(model)
    assert facts(model) == known


def test_folding_in_inference_mode_leaves_no_mark() -> None:
    model = build("glm")
    known = facts(model)
    with torch.inference_mode():
        fold(model, quiet=True)
    unfold(model)
    assert facts(model) == known
    model(torch.arange(9)[None]).logits.sum().backward()


def test_a_model_made_in_inference_mode_folds_and_unfolds() -> None:
    with torch.inference_mode():
        model = build("glm")
    before = logits(model)
    fold(model, quiet=True)
    unfold(model)
    assert torch.equal(logits(model), before)


def test_experts_of_two_dtypes_come_back_as_they_were() -> None:
    model = build("glm")
    model.model.layers[1].mlp.shared_experts.to(torch.bfloat16)
    known = facts(model)
    assert fold(model, quiet=True).refused == {}
    unfold(model)
    assert facts(model) == known


def test_a_dtype_that_is_asked_for() -> None:
    model = build("glm")
    fold(model, quiet=True)
    model.to(torch.bfloat16)
    unfold(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert torch.isfinite(logits(model)).all()


def test_a_loaded_model_unfolds_in_the_dtype_it_was_loaded_in() -> None:
    model = load(TINY_V4, dtype=torch.bfloat16, device="cpu", quiet=True)
    unfold(model)
    experts = {name: p for name, p in model.named_parameters() if "experts" in name}
    assert len(experts) == 5 * 5
    assert {(p.dtype, p.requires_grad) for p in experts.values()} == {(torch.bfloat16, False)}
    assert torch.isfinite(logits(model)).all()


def test_a_folded_model_is_not_saved_without_its_experts(tmp_path: Path) -> None:
    model = build("glm")
    before = logits(model)
    fold(model, quiet=True)
    for save in (model.state_dict, lambda: model.save_pretrained(tmp_path)):
        with pytest.raises(RuntimeError, match=r"layers\.1\.mlp is folded: .*\.unfold\(model\) first"):
            save()
    assert not list(tmp_path.glob("*.safetensors"))
    unfold(model)
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert torch.equal(logits(again), before)


def test_copies_pickles_and_moves_work_as_on_any_model() -> None:
    model = build("glm")
    stock = logits(model)
    fold(model, quiet=True)
    before = logits(model)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    model.to("cpu").to(torch.float32)
    for other in (model, twin, read):
        assert torch.equal(logits(other), before)
        assert unfold(other) == 3
        assert torch.equal(logits(other), stock)


def test_a_folded_block_in_the_models_place_is_refused() -> None:
    model = build("glm")
    fold(model, quiet=True)
    before = logits(model)
    with pytest.raises(ValueError, match=r"found one MoE block \(FoldedBlock\) in place of a model"):
        unfold(model.model.layers[1].mlp)
    assert torch.equal(logits(model), before)


def test_folding_twice_changes_nothing() -> None:
    model = build("glm")
    fold(model, quiet=True)
    assert fold(model, quiet=True).total == 0
    assert sum(isinstance(module, FoldedBlock) for module in model.modules()) == 3


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nothing: no such folder; expected one with config\.json"):
        load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"config\.json: no such folder"):
        load(TINY_V4 / "config.json")


def test_a_name_in_the_policys_place() -> None:
    for call in (lambda: fold(build("glm"), "native"), lambda: load(TINY_V4, "native")):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"must be a FusionPolicy, found 'native'; FusionPolicy\('native'\), say"):
            call()


@pytest.mark.parametrize("dtype", [torch.float64, "bfloat16"])
def test_a_dtype_that_no_layer_runs(dtype: Any) -> None:
    with pytest.raises(TypeError, match=r"dtype must be torch\.bfloat16, torch\.float16 or torch\.float32, found"):
        load(TINY_V4, dtype=dtype)


def test_a_device_to_plan_for_alone() -> None:
    with pytest.raises(ValueError, match=r"device 'h200' is a name to plan for"):
        load(TINY_V4, device="h200")
