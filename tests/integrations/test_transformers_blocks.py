"""Blocks that do more than gate, routed experts and shared expert stay stock; decisions come before the first swap."""

from __future__ import annotations

from importlib import import_module
from types import MethodType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from foldmoe import FusionPolicy
from foldmoe.checkpoint import CheckpointError
from foldmoe.reference import relative_error

if TYPE_CHECKING:
    from pathlib import Path

transformers = pytest.importorskip("transformers")

from foldmoe.integrations.transformers import FoldedBlock, fold, load  # noqa: E402
from tests.integrations.test_transformers import build, logits  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
}
STEP = ("step3p7", "Step3p7SparseMoeBlock", "Step3p7TextConfig")
COHERE = ("cohere2_moe", "Cohere2MoeSparseMoeBlock", "Cohere2MoeConfig")
ERNIE = ("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock", "Ernie4_5_MoeConfig")
LAGUNA = ("laguna", "LagunaSparseMoeBlock", "LagunaConfig")
Kind = tuple[str, str, str]


def holder(kind: Kind, **options: Any) -> nn.Module:
    """A module that holds one block of a Transformers class."""
    folder, block_class, config_class = kind
    try:
        modeling = import_module(f"transformers.models.{folder}.modeling_{folder}")
        configuration = import_module(f"transformers.models.{folder}.configuration_{folder}")
    except ImportError:
        pytest.skip(f"this Transformers has no {folder}")
    config = getattr(configuration, config_class)()
    config._experts_implementation = "eager"
    layer = {"layer_idx": 3} if kind == STEP else {}
    for name, value in (SIZES | options).items():
        setattr(config, name, value)
    model = nn.Module()
    model.mlp = getattr(modeling, block_class)(config, **layer).eval()
    random = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2, generator=random)
    for buffer in model.buffers():
        buffer.zero_()
    return model


@torch.no_grad()
def answer(model: nn.Module) -> torch.Tensor:
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1))
    y: torch.Tensor = model.mlp(x)
    return y


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        pytest.param(STEP, {"moe_router_scaling_factor": 3.0, "swiglu_limits": [0, 0, 0, 0.5]}, "more", id="clamp"),
        pytest.param(
            COHERE, {"num_shared_experts": 2, "shared_expert_combination_strategy": "average"}, "more", id="average"
        ),
        pytest.param(
            ("axk1", "AXK1MoE", "AXK1Config"),
            {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
            "AXK1MoE does more",
            id="norm",
        ),
        pytest.param(
            ("hy_v3", "HYV3MoE", "HYV3Config"), {"num_shared_experts": 1}, "folded it does not: TypeError", id="gate"
        ),
        pytest.param(
            ("inkling", "InklingMoE", "InklingTextConfig"), {}, "parameters of the shared expert are", id="inkling"
        ),
    ],
)
def test_a_block_that_does_more_stays_stock(kind: Kind, options: dict[str, Any], reason: str) -> None:
    model = holder(kind, **options)
    before = answer(model)
    report = fold(model, FusionPolicy("native"), quiet=True)
    assert report.plans == []
    assert reason in report.refused["mlp"][0]
    assert torch.equal(answer(model), before)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param(ERNIE, {"moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1}, id="ernie"),
        pytest.param(COHERE, {"num_shared_experts": 2, "shared_expert_combination_strategy": "sum"}, id="cohere"),
        pytest.param(LAGUNA, {"moe_routed_scaling_factor": 1.0}, id="laguna"),
        pytest.param(LAGUNA, {"moe_routed_scaling_factor": 2.5}, id="laguna's factor"),
        pytest.param(STEP, {"moe_router_scaling_factor": 3.0}, id="step's factor"),
        pytest.param(("flint", "FlintSparseMoeBlock", "FlintConfig"), {}, id="flint"),
    ],
)
def test_classes_fold_where_they_do_no_more_than_scale_the_routed_sum(kind: Kind, options: dict[str, Any]) -> None:
    model = holder(kind, **options)
    before = answer(model)
    assert len(fold(model, FusionPolicy("native"), quiet=True).plans) == 1
    assert isinstance(model.mlp, FoldedBlock)
    assert relative_error(answer(model), before) < 1e-5


def test_extra_parameters_stay_stock() -> None:
    """As adapters have them; the folded block would drop them."""
    model = build("glm")
    block = model.model.layers[2].mlp
    block.shared_experts.adapter = nn.Linear(64, 4, bias=False)
    assert "adapter.weight" in fold(model, quiet=True).refused["model.layers.2.mlp"][0]


def test_a_clamp_that_is_none_stays_stock() -> None:
    model = build("glm")
    model.model.layers[2].mlp.experts.limit = 0.0
    reason = "routed experts clamp at 0.0; expected a number above 0"
    assert fold(model, quiet=True).refused == {"model.layers.2.mlp": (reason,)}


def test_a_replaced_forward_stays_stock() -> None:
    model = build("glm")
    block = model.model.layers[2].mlp
    block.forward = MethodType(lambda self, x: x, block)
    report = fold(model, quiet=True)
    assert report.refused == {"model.layers.2.mlp": ("Glm4MoeMoE.forward was replaced in this model",)}
    assert report.total == len(report.plans) + 1


def test_the_comparison_leaves_model_and_random_numbers_alone() -> None:
    model = build("glm")
    seen = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: seen.append(1))
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    fold(model, quiet=True)
    assert torch.equal(torch.rand(1), expected)
    assert seen == []
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    assert model.config._experts_implementation != "eager"


def test_blocks_with_accelerates_hooks_and_compiled_ones_fold() -> None:
    from accelerate import dispatch_model

    model = build("glm")
    before = logits(model)
    model.model.layers[2].mlp.compile(backend="eager")
    dispatch_model(model, {"": "cpu"}, force_hooks=True)
    assert "forward" in vars(model.model.layers[1].mlp)
    assert fold(model, quiet=True).refused == {}
    assert relative_error(logits(model), before) < 1e-5


def test_odd_weights_are_refused_and_the_other_layers_fold() -> None:
    model = build("glm")
    experts = model.model.layers[2].mlp.experts
    experts.to(torch.float64)
    report = fold(model, quiet=True)
    reason = "weights of the routed experts are in float64; expected bfloat16, float16 or float32"
    assert report.refused == {"model.layers.2.mlp": (reason,)}
    assert experts.gate_up_proj.dtype == torch.float64
    assert not experts.gate_up_proj.is_meta


def test_a_model_in_float64_stays_stock() -> None:
    model = build("glm", torch.float64)
    report = fold(model, quiet=True)
    assert report.plans == []
    assert len(report.refused) == 3


def test_transformers_own_fp8_experts_stay_stock() -> None:
    from transformers import FineGrainedFP8Config
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    model = replace_with_fp8_linear(build("glm"), quantization_config=FineGrainedFP8Config())
    report = fold(model, quiet=True)
    assert report.plans == []
    assert all("gate_up_proj_scale_inv" in "; ".join(reasons) for reasons in report.refused.values())


def test_weights_on_the_meta_device_stay_stock() -> None:
    model = build("glm").to("meta")
    report = fold(model, quiet=True)
    assert set(report.refused.values()) == {("weights are on the meta device: offloaded, or never loaded",)}


def test_a_block_in_the_models_place_is_refused_before_it_is_touched() -> None:
    model = build("glm")
    block = model.model.layers[1].mlp
    before = logits(model)
    with pytest.raises(ValueError, match=r"found one MoE block \(Glm4MoeMoE\) in place of a model"):
        fold(block, quiet=True)
    assert torch.equal(logits(model), before)


def test_an_unknown_backend_raises_before_a_block_is_touched() -> None:
    model = build("glm")
    with pytest.raises(ValueError, match="no backend called 'nope'"):
        fold(model, FusionPolicy(backend="nope"), quiet=True)
    assert not any(isinstance(module, FoldedBlock) for module in model.modules())


def test_weights_refused_at_packing_leave_the_block_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from foldmoe.backends.torch.backend import TorchBackend

    model = build("glm")
    before = logits(model)
    pack = TorchBackend.pack

    def refuse(self: TorchBackend, routed: Any, *args: Any, **options: Any) -> Any:
        if routed.width == 32:  # not the narrow copies
            raise ValueError("rows that nobody can pack")
        return pack(self, routed, *args, **options)

    monkeypatch.setattr(TorchBackend, "pack", refuse)
    report = fold(model, quiet=True)
    assert set(report.refused.values()) == {("rows that nobody can pack",)}
    assert torch.equal(logits(model), before)


@pytest.fixture(scope="module")
def laguna(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Laguna checkpoint, whose blocks scale the routed sum by 2.5."""
    if not hasattr(transformers, "LagunaConfig"):
        pytest.skip("this Transformers has no Laguna")
    config = transformers.LagunaConfig(
        **{name: SIZES[name] for name in ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_experts")},
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        vocab_size=99, shared_expert_intermediate_size=32, moe_routed_scaling_factor=2.5,
        num_attention_heads_per_layer=[4, 4], bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("laguna")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("how", ["native", "off"])
def test_a_factor_of_the_block_is_loaded_too(laguna: Path, how: Any) -> None:
    stock = transformers.AutoModelForCausalLM.from_pretrained(laguna, dtype=torch.float32).eval()
    loaded = load(laguna, FusionPolicy(how), dtype=torch.float32, quiet=True)
    blocks = [module for module in loaded.modules() if isinstance(module, FoldedBlock)]
    assert {block.routed_scale for block in blocks} == {2.5}
    assert relative_error(logits(loaded), logits(stock)) < 1e-5


@pytest.mark.parametrize("how", ["native", "off"])
def test_loading_a_model_that_does_more_is_an_error_that_names_the_block(
    laguna: Path, how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = import_module("transformers.models.laguna.modeling_laguna").LagunaSparseMoeBlock
    plain = block.forward
    monkeypatch.setattr(block, "forward", lambda self, x: plain(self, x).tanh())
    with pytest.raises(CheckpointError, match=r"layers\.\d\.mlp: LagunaSparseMoeBlock does more .* FusionPolicy\('sto"):
        load(laguna, FusionPolicy(how), dtype=torch.float32, quiet=True)


def test_it_loads_with_its_own_blocks(laguna: Path) -> None:
    stock = transformers.AutoModelForCausalLM.from_pretrained(laguna, dtype=torch.float32).eval()
    loaded = load(laguna, FusionPolicy("stock"), dtype=torch.float32, quiet=True)
    assert relative_error(logits(loaded), logits(stock)) < 1e-5
