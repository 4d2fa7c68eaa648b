"""Checkpoints that Transformers saved: names that it keeps and tensors that it converts, outside the experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe import FusionPolicy
from foldmoe.checkpoint import CheckpointError
from foldmoe.demo import TINY_V4
from foldmoe.reference import relative_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

transformers = pytest.importorskip("transformers")

from foldmoe.integrations.transformers import load, unfold  # noqa: E402
from foldmoe.integrations.transformers.naming import ordered  # noqa: E402
from tests.integrations.test_transformers import COMMON, LINEAR, build, logits  # noqa: E402

LATENT = {
    **COMMON,
    "intermediate_size": 96,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
CONVERTED: dict[str, dict[str, Any]] = {
    "kimi_linear": LATENT,
    "bailing_hybrid": LATENT,
    "lara_mini": {
        **COMMON,
        **LINEAR,
        "num_experts": 8,
        "shared_expert_intermediate_size": 48,
        "head_dim": 16,
        "eos_token_id": 2,
    },
}
"""By type: q, k and v kernels that become one (the first two), and one input projection that becomes four."""


def saved(kind: str, folder: Path) -> Path:
    """A random float32 model in the folder, as Transformers saves it."""
    try:
        config = transformers.AutoConfig.for_model(kind, **CONVERTED[kind])
    except ValueError:
        pytest.skip(f"this Transformers has no {kind}")
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_v4_that_transformers_saved_loads_again(tmp_path: Path) -> None:
    model = load(TINY_V4, device="cpu", quiet=True)
    unfold(model)
    model.save_pretrained(tmp_path)
    again = load(tmp_path, FusionPolicy("stock"), device="cpu", quiet=True)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONVERTED)
def test_tensors_are_converted_as_transformers_does(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = saved(kind, tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    model = load(folder, FusionPolicy("stock"), dtype=dtype, device="cpu", quiet=True)
    own = model.state_dict()
    assert own.keys() == expected.state_dict().keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.state_dict().items())
    assert torch.equal(logits(model), logits(expected))


def test_a_converted_model_folds(tmp_path: Path) -> None:
    folder = saved("kimi_linear", tmp_path)
    folded, stock = (
        load(folder, FusionPolicy(how), dtype=torch.float32, device="cpu", quiet=True)  # type: ignore[arg-type]
        for how in ("native", "stock")
    )
    assert folded.fold_report.count("native") == 3
    assert relative_error(logits(folded), logits(stock)) < 1e-5


def test_parts_too_few_are_an_error_that_names_those_there_are(tmp_path: Path) -> None:
    folder = saved("kimi_linear", tmp_path)
    part = "model.layers.{}.self_attn.{}_conv1d.weight"
    edit(folder, lambda tensors: [tensors.pop(part.format(layer, "k")) for layer in (0, 2)])
    with pytest.raises(CheckpointError) as raised:
        load(folder, device="cpu", quiet=True)
    assert str(raised.value).splitlines()[1:] == [
        f"  of another shape: model.layers.{layer}.self_attn.conv1d.weight, expected [192, 1, 4], found [128, 1, 4] "
        f"from {part.format(layer, 'q')}, {part.format(layer, 'v')}"
        for layer in (0, 2)
    ]


def test_a_tensor_that_does_not_split_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = saved("lara_mini", tmp_path)
    name = "model.layers.0.linear_attn.in_proj.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name][1:].clone()}))
    with pytest.raises(CheckpointError, match=rf"not convertible: {name} to .*\.in_proj_qkv\.weight, RuntimeError: "):
        load(folder, device="cpu", quiet=True)


def test_a_plain_tensor_of_another_shape_is_listed(tmp_path: Path) -> None:
    build("glm").save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(63)}))
    match = r"of another shape: model\.norm\.weight, expected \[64\], found \[63\] from model\.norm\.weight"
    with pytest.raises(CheckpointError, match=match):
        load(tmp_path, device="cpu", quiet=True)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    build("glm").save_pretrained(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"norm.weight": torch.zeros(64)}))
    with pytest.raises(CheckpointError, match=r"twice: model\.norm\.weight, from .*norm\.weight and from norm\.weight"):
        load(tmp_path, device="cpu", quiet=True)


def test_names_are_ordered_by_number() -> None:
    assert ordered(["a.10.w", "b.w", "a.2.w"]) == ["a.2.w", "a.10.w", "b.w"]
