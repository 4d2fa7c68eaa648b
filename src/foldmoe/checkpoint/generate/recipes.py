"""Small checkpoints of other families: their MoE layers in real names and formats, and little else."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foldmoe.checkpoint.generate.experts import Geometry, MoERecipe, Naming, Storage, moe_tensors
from foldmoe.formats import Format

if TYPE_CHECKING:
    from collections.abc import Iterator

_DYNAMIC = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_BF16 = Storage(Format.BF16)


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Args:
        block: name of a layer's MoE block, with the layer's number as ``{}``.
        recipe: of the main layers.
        config: config.json.
        layers: main MoE layers.
        first: number of the first one; the layers before it are dense.
        drafts: names of draft blocks and their recipe.
        extra: further tensors of every main block, by name.
    """

    block: str
    recipe: MoERecipe
    config: dict[str, Any]
    layers: int = 2
    first: int = 0
    drafts: tuple[tuple[str, MoERecipe], ...] = ()
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)


def _keys(geometry: Geometry, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": geometry.hidden,
        "moe_intermediate_size": geometry.width,
        "num_experts_per_tok": geometry.top_k,
        "hidden_act": "silu",
        **more,
    }


_V41 = Geometry(256, 288, 8, 3)
_V41_STORAGE = (Storage(Format.MXFP4, scale="scale"), Storage(Format.FP8_32x32, scale="scale"))
_V4_NAMES = Naming(("w1", "w3", "w2"), bias="gate.bias")
_GLM = Geometry(256, 192, 10, 2)
_QWEN = Geometry(128, 64, 8, 2, shared_width=96, gated=True)
_PLAIN = Geometry(128, 64, 8, 2)
_MINIMAX = Geometry(128, 96, 8, 2)
_MXFP8 = Storage(Format.MXFP8, scale_dtype=torch.uint8)

FAMILIES: dict[str, Family] = {
    "v4.1": Family(
        "layers.{}.ffn",
        MoERecipe(_V41, *_V41_STORAGE, _V4_NAMES),
        {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "text_config": _keys(
                _V41, num_hidden_layers=2, n_routed_experts=8, n_shared_experts=1, swiglu_limit=10.0,
                scoring_func="sqrtsoftplus", routed_scaling_factor=1.5, norm_topk_prob=True, num_nextn_predict_layers=1,
                dspark_n_routed_experts=4, dspark_num_experts_per_tok=2,
            ),
            "quantization_config": {
                **_DYNAMIC, "scale_fmt": "ue8m0", "weight_block_size": [32, 32], "expert_dtype": "fp4"
            },
        },
        drafts=(("mtp.0.ffn", MoERecipe(Geometry(256, 288, 4, 2), *_V41_STORAGE, _V4_NAMES)),),
        extra={"gate.bias_vl": (8,)},
    ),
    "glm-fp8": Family(
        "model.layers.{}.mlp",
        MoERecipe(_GLM, Storage(Format.FP8_128x128), Storage(Format.FP8_128x128)),
        {
            "architectures": ["Glm4MoeForCausalLM"],
            "model_type": "glm4_moe",
            **_keys(
                _GLM, num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=10, n_shared_experts=1, n_group=1,
                topk_group=1, routed_scaling_factor=2.5, norm_topk_prob=True, num_nextn_predict_layers=1,
            ),
            "quantization_config": {**_DYNAMIC, "weight_block_size": [128, 128]},
        },
        first=1,
        drafts=(("model.layers.3.mlp", MoERecipe(_GLM, Storage(Format.FP8_128x128), Storage(Format.FP8_128x128))),),
    ),
    "qwen": Family(
        "model.layers.{}.mlp",
        MoERecipe(_QWEN, _BF16, _BF16, Naming(shared="shared_expert", bias=None)),
        {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            **_keys(
                _QWEN, num_hidden_layers=2, num_experts=8, shared_expert_intermediate_size=96, norm_topk_prob=True
            ),
        },
    ),
    "bf16": Family(
        "model.layers.{}.mlp",
        MoERecipe(_PLAIN, _BF16, _BF16),
        {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **_keys(
                _PLAIN, num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=8, n_shared_experts=1, n_group=2,
                topk_group=1, scoring_func="sigmoid", topk_method="noaux_tc", norm_topk_prob=True,
                routed_scaling_factor=2.5,
            ),
        },
        first=1,
    ),
    "stacked": Family(
        "model.layers.{}.mlp",
        MoERecipe(
            Geometry(128, 64, 8, 2), Storage(Format.MXFP4, scale="weight_scale", packed_dtype=torch.uint8), _BF16,
            Naming(stacked="w13"),
        ),
        {
            "model_type": "deepseek_v3",
            **_keys(_PLAIN, num_hidden_layers=2, n_routed_experts=8, n_shared_experts=1, scoring_func="sigmoid"),
            "expert_dtype": "fp4",
        },
    ),
    "minimax-mxfp8": Family(
        "language_model.model.layers.{}.block_sparse_moe",
        MoERecipe(
            _MINIMAX, _MXFP8, _MXFP8,
            Naming(("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj"), bias="e_score_correction_bias"),
        ),
        {
            "model_type": "minimax_m3_vl",
            "text_config": {
                "hidden_size": 128, "intermediate_size": 96, "shared_intermediate_size": 96, "num_hidden_layers": 2,
                "num_local_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "hidden_act": "swigluoai",
                "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "scoring_func": "sigmoid", "routed_scaling_factor": 2.0,
            },
            "quantization_config": {
                "quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]
            },
        },
    ),
}  # fmt: skip


def tensors(family: Family, seed: int) -> Iterator[tuple[str, Tensor]]:
    """MoE layers and drafts, an embedding and a final norm."""
    random = torch.Generator().manual_seed(seed)
    hidden = family.recipe.geometry.hidden
    prefix = family.block.split("layers.", maxsplit=1)[0]
    yield f"{prefix}embed_tokens.weight", (torch.randn(64, hidden, generator=random) * 0.5).to(torch.bfloat16)
    yield f"{prefix}norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(family.first):
        block = family.block.format(layer)
        yield f"{block}.gate_proj.weight", torch.zeros(2 * hidden, hidden, dtype=torch.bfloat16)
    for layer in range(family.first, family.first + family.layers):
        block = family.block.format(layer)
        yield from moe_tensors(block, family.recipe, random)
        for name, shape in family.extra.items():
            yield f"{block}.{name}", torch.randn(shape, generator=random) * 0.01
    for block, recipe in family.drafts:
        yield from moe_tensors(block, recipe, random)


def kimi_int4(seed: int) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
    """Kimi-K2-Thinking's layout: routed int4 in ``weight_packed``, bf16 shared expert. No format here reads it."""
    random = torch.Generator().manual_seed(seed)
    hidden, width, experts = 128, 64, 4

    def named() -> Iterator[tuple[str, Tensor]]:
        block = "model.layers.1.mlp"
        yield f"{block}.gate.weight", torch.randn(experts, hidden, generator=random).to(torch.bfloat16)
        shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
        for matrix, (rows, columns) in shapes.items():
            for expert in range(experts):
                at = f"{block}.experts.{expert}.{matrix}"
                packed = torch.randint(-(2**31), 2**31, (rows, columns // 8), generator=random, dtype=torch.int64)
                yield f"{at}.weight_packed", packed.to(torch.int32)
                yield f"{at}.weight_scale", torch.ones(rows, columns // 32, dtype=torch.bfloat16)
                yield f"{at}.weight_shape", torch.tensor([rows, columns])
            yield f"{block}.shared_experts.{matrix}.weight", torch.zeros(rows, columns, dtype=torch.bfloat16)

    config = {
        "model_type": "kimi_k2", "hidden_size": hidden, "moe_intermediate_size": width, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "quantization_config": {"quant_method": "compressed-tensors"},
    }  # fmt: skip
    return config, named()
