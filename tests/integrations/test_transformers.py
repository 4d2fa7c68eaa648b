"""Transformers models folded, unfolded and loaded with packed experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foldmoe import FusionPolicy
from foldmoe.checkpoint import CheckpointError
from foldmoe.checkpoint.generate import generate
from foldmoe.reference import relative_error

transformers = pytest.importorskip("transformers")

from foldmoe.integrations.transformers import FoldedBlock, fold, load, unfold  # noqa: E402

COMMON = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 3,
}
DEEPSEEK = {
    **COMMON,
    "intermediate_size": 96,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
}
QWEN = {**COMMON, "num_experts": 8, "shared_expert_intermediate_size": 48, "intermediate_size": 96, "head_dim": 16}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("Glm4Moe", {**DEEPSEEK, "head_dim": 16}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "qwen2_moe": ("Qwen2Moe", QWEN),
    "qwen3_next": ("Qwen3Next", {**QWEN, **LINEAR}),
    "qwen3_5_moe": ("Qwen3_5Moe", {**QWEN, **LINEAR}),
}


def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
    stem, options = FAMILIES[family]
    config_class = getattr(transformers, f"{stem}TextConfig", None) or getattr(transformers, f"{stem}Config", None)
    model_class = getattr(transformers, f"{stem}ForCausalLM", None)
    if config_class is None or model_class is None:
        pytest.skip(f"this Transformers has no {stem}")
    torch.manual_seed(0)
    model = model_class(config_class(**options)).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "experts" in name or "shared_expert" in name:
                parameter.normal_(std=0.2)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 25)[None]
    return model(ids).logits.double()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folded_model_says_what_the_stock_model_says(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = build(family)
    before = logits(model)
    report = fold(model)
    assert report.count("native") == report.total >= 2
    assert (
        f"folded {report.total}/{report.total} layers (native {report.total}, slot 0), +0 B" in capsys.readouterr().out
    )
    assert relative_error(logits(model), before) < 1e-5
    assert unfold(model) == report.total
    assert not any(isinstance(module, FoldedBlock) for module in model.modules())
    assert torch.equal(logits(model), before)


def test_the_shared_expert_is_really_in_the_fold() -> None:
    model = build("glm")
    fold(model, quiet=True)
    before = logits(model)
    for module in model.modules():
        if isinstance(module, FoldedBlock):
            module.moe.packed.shared.down.values.zero_()
    assert relative_error(logits(model), before) > 1e-2


def test_nothing_is_held_twice() -> None:
    model = build("glm")
    expert = next(m for m in model.modules() if hasattr(m, "experts") and hasattr(m, "shared_experts"))
    storage = expert.experts.gate_up_proj.data_ptr()
    fold(model, quiet=True)
    block = next(m for m in model.modules() if isinstance(m, FoldedBlock))
    assert block.moe.packed.routed.gate_up.values.data_ptr() == storage
    assert all(parameter.device.type == "meta" for parameter in block.stock.experts.parameters())
    assert not any("experts.gate_up" in name for name, _ in model.named_parameters())


def test_generation_goes_on_as_before() -> None:
    model = build("glm")
    ids = torch.arange(3, 12)[None]
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    before = model.generate(ids, **options)
    fold(model, quiet=True)
    assert torch.equal(model.generate(ids, **options), before)


def test_compiled_models_keep_their_answers() -> None:
    model = build("glm")
    fold(model, quiet=True)
    before = logits(model)
    model.forward = torch.compile(model.forward, backend="aot_eager")
    assert relative_error(logits(model), before) < 1e-5


def test_foreign_activations_stay_stock_with_the_reason() -> None:
    stem, options = FAMILIES["glm"]
    config = getattr(transformers, f"{stem}Config")(**options, hidden_act="gelu")
    model = getattr(transformers, f"{stem}ForCausalLM")(config)
    report = fold(model, quiet=True)
    assert report.plans == []
    assert all("only silu(gate) * up is known" in reasons[0] for reasons in report.refused.values())
    assert "stock: routed experts use" in report.lines()[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(generate("v4", tmp_path_factory.mktemp("v4") / "checkpoint"))


@pytest.mark.parametrize("fold_as", ["native", "off", "slot"])
def test_a_v4_checkpoint_loads_with_its_experts_packed(checkpoint: Path, fold_as: str) -> None:
    model = load(checkpoint, FusionPolicy(fold_as, allow_requantize=True), quiet=True)  # type: ignore[arg-type]
    blocks = [module for module in model.modules() if isinstance(module, FoldedBlock)]
    assert len(blocks) == model.config.num_hidden_layers
    for block in blocks:
        assert block.moe.packed.routed.format.value == "mxfp4"
        assert block.moe.plan.activations == "fp8"
    assert torch.isfinite(logits(model)).all()


def test_folded_and_serial_models_agree_to_the_bit(checkpoint: Path) -> None:
    native, serial = (load(checkpoint, FusionPolicy(f), quiet=True) for f in ("native", "off"))  # type: ignore[arg-type]
    assert torch.equal(logits(native), logits(serial))


def test_stock_blocks_hold_the_same_numbers(checkpoint: Path) -> None:
    """Quantised activations aside, Transformers' own block computes what ours does: layer by layer, on one input."""
    ours = load(checkpoint, FusionPolicy("native", activations="bf16"), dtype=torch.float32, quiet=True)
    stock = load(checkpoint, FusionPolicy("stock"), dtype=torch.float32, quiet=True)
    assert relative_error(logits(ours), logits(stock)) < 1e-4


def test_unfolding_a_loaded_model_gives_its_dequantised_blocks(checkpoint: Path) -> None:
    model = load(checkpoint, FusionPolicy("native"), dtype=torch.float32, quiet=True)
    stock = load(checkpoint, FusionPolicy("stock"), dtype=torch.float32, quiet=True)
    assert unfold(model) == model.config.num_hidden_layers
    assert torch.equal(logits(model), logits(stock))


def test_a_tensor_too_few_or_too_many_is_an_error_that_lists_them(checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in checkpoint.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shard = next(path for path in sorted(tmp_path.glob("*.safetensors")) if "norm.weight" in load_file(path))
    tensors = load_file(shard)
    tensors["layers.0.surprise.weight"] = tensors.pop("norm.weight")
    save_file(tensors, shard)
    with pytest.raises(
        CheckpointError, match=r"missing: model\.norm\.weight\s+unexpected: layers\.0\.surprise\.weight"
    ):
        load(tmp_path, quiet=True)
