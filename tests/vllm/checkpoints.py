"""Small random bf16 checkpoints that vLLM serves with its own model code."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from pathlib import Path

COMMON: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 96,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 1024,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "initializer_range": 0.08,
}


def glm(folder: Path, positions: int = COMMON["max_position_embeddings"], top_k: int = 2) -> Path:
    """Glm4Moe, a dense layer and a MoE layer of 8 experts.

    One MoE layer: no router follows it, so that its rounding cannot change a route (random weights have near ties).

    Args:
        positions: the longest sequence, in tokens.
        top_k: 8 where attention rounds in two ways, as it does for drafts and cut in two: no route can change then.
    """
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    facts = {**COMMON, "max_position_embeddings": positions, "num_hidden_layers": 2, "num_key_value_heads": 2}
    config = Glm4MoeConfig(head_dim=32, n_routed_experts=8, num_experts_per_tok=top_k, **facts)
    return _save(Glm4MoeForCausalLM, config, folder)


def deepseek_v3(folder: Path) -> Path:
    """DeepseekV3, a dense layer and two MoE layers of 4 experts, all of them chosen: no route can change either."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    config = DeepseekV3Config(
        num_hidden_layers=3,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=4,
        **COMMON,
    )
    saved = _save(DeepseekV3ForCausalLM, config, folder)
    stated = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**stated, "topk_method": "noaux_tc"}))
    return saved


def qwen(folder: Path, top_k: int = 2) -> Path:
    """Qwen2Moe, a dense layer and a MoE layer of 8 experts, with one shared expert behind a gate of its own.

    Args:
        top_k: see :func:`glm`.
    """
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    names = "vocab_size hidden_size intermediate_size moe_intermediate_size num_attention_heads norm_topk_prob"
    facts = {name: COMMON[name] for name in (*names.split(), "max_position_embeddings", "initializer_range")}
    config = Qwen2MoeConfig(
        num_hidden_layers=2,
        num_key_value_heads=2,
        mlp_only_layers=[0],
        num_experts=8,
        num_experts_per_tok=top_k,
        shared_expert_intermediate_size=192,
        **facts,
    )
    return _save(Qwen2MoeForCausalLM, config, folder)


def _save(model_class: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    model = model_class(config)
    # Logits below 1: a step of bf16 there is smaller than the gap that the comparison asks for.
    model.lm_head.weight.data *= 0.2 / (COMMON["initializer_range"] * COMMON["hidden_size"] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def with_draft(checkpoint: Path, folder: Path) -> Path:
    """:func:`glm` with one draft (MTP) layer: its last layer again, behind a projection of state and next token."""
    folder.mkdir()
    hidden, last = COMMON["hidden_size"], "model.layers.1."
    tensors = load_file(checkpoint / "model.safetensors")
    own = {name.removeprefix(last): tensor for name, tensor in tensors.items() if name.startswith(last)}
    own |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in ("enorm", "hnorm")}
    own["shared_head.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    own["shared_head.head.weight"] = tensors["lm_head.weight"]
    own["embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    own["eh_proj.weight"] = torch.randn(hidden, 2 * hidden).mul(COMMON["initializer_range"]).to(torch.bfloat16)
    tensors |= {f"model.layers.2.{name}": tensor.clone() for name, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((checkpoint / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "num_nextn_predict_layers": 1}))
    return folder


def thinking(checkpoint: Path, folder: Path) -> Path:
    """tiny-v4 whose mark between steps and answer, ``####``, is spelled ``</think>``, which reasoning parsers know."""
    shutil.copytree(checkpoint, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["</think>"] = vocabulary.pop("####")
    vocabulary["<think>"] = len(vocabulary)  # parsers ask for it; the model never says it
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


_LAST_OF_SHARED = (".shared_experts.down_proj.weight", ".shared_expert.down_proj.weight", ".shared_experts.w2.weight")


def without_shared(checkpoint: Path, folder: Path) -> Path:
    """The same checkpoint with every shared expert's down projection zero."""
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.suffix == ".safetensors":
            tensors = load_file(file)
            for name, tensor in tensors.items():
                if name.endswith(_LAST_OF_SHARED):
                    tensors[name] = torch.zeros_like(tensor)
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
        elif file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder
