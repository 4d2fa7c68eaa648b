# SPDX-License-Identifier: Apache-2.0
"""Writes tiny-v4 as a stored DeepSeek-V4 checkpoint, and reads such a checkpoint back on its own.

`load_stored` uses nothing of foldmoe: it is the plain reference path that foldmoe's loader is compared with.

    python export.py STORED_FOLDER      lists what a stored checkpoint holds
"""

import json
import re
import sys
from pathlib import Path

import torch
from quantise import fp8_decode, fp8_encode, mxfp4_decode, mxfp4_encode, storage_of
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizer import save_tokenizer
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

# Transformers' names -> stored names, applied in this order to names without their leading "model.".
RENAMES = (
    (r"^embed_tokens\.", "embed."), (r"^lm_head\.", "head."), (r"^hc_head\.hc_", "hc_head_"),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"), (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."), (r"\.self_attn\.", ".attn."), (r"\.mlp\.", ".ffn."),
    (r"\.q_a_proj\.", ".wq_a."), (r"\.q_b_proj\.", ".wq_b."), (r"\.kv_proj\.", ".wkv."), (r"\.o_a_proj\.", ".wo_a."),
    (r"\.o_b_proj\.", ".wo_b."), (r"\.q_a_norm\.", ".q_norm."), (r"\.sinks$", ".attn_sink"),
    (r"\.e_score_correction_bias$", ".bias"), (r"\.shared_experts\.gate_proj\.", ".shared_experts.w1."),
    (r"\.shared_experts\.down_proj\.", ".shared_experts.w2."), (r"\.shared_experts\.up_proj\.", ".shared_experts.w3."))

QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic",
                "weight_block_size": [128, 128]}


def stored_name(name: str) -> str:
    name = name.removeprefix("model.")
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def stored_tensors(model: DeepseekV4ForCausalLM) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint, in the stored formats."""
    stored = {}

    def add(stem: str, values: torch.Tensor, scales: torch.Tensor) -> None:
        stored[f"{stem}.weight"], stored[f"{stem}.scale"] = values.contiguous(), scales.contiguous()

    for name, weight in model.state_dict().items():
        weight, storage, target = weight.detach().cpu(), storage_of(name), stored_name(name)
        if storage == "mxfp4":
            at = target.rsplit(".", 1)[0]
            for expert, matrix in enumerate(weight):
                parts = zip(("w1", "w3"), matrix.chunk(2)) if name.endswith("gate_up_proj") else (("w2", matrix),)
                for part, values in parts:
                    add(f"{at}.{expert}.{part}", *mxfp4_encode(values))
        elif storage == "fp8":
            add(target.removesuffix(".weight"), *fp8_encode(weight))
        elif storage == "bf16":
            stored[target] = weight.bfloat16()
        else:
            stored[target] = weight.contiguous()
    return stored


def stored_config(config: DeepseekV4Config) -> dict:
    """config.json with the keys of the published V4 checkpoints."""
    kept = ("vocab_size", "hidden_size", "moe_intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
            "num_experts_per_tok", "n_routed_experts", "n_shared_experts", "scoring_func", "norm_topk_prob",
            "routed_scaling_factor", "swiglu_limit", "sliding_window", "max_position_embeddings", "rope_theta",
            "compress_rope_theta", "hc_mult", "hc_sinkhorn_iters", "hc_eps", "index_n_heads", "index_head_dim",
            "index_topk", "num_nextn_predict_layers", "hidden_act", "initializer_range", "rms_norm_eps", "use_cache",
            "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "attention_bias",
            "attention_dropout")
    return {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
            **{key: getattr(config, key) for key in kept},
            "num_hash_layers": config.mlp_layer_types.count("hash_moe"),
            "compress_ratios": [0] * config.num_hidden_layers, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
            "expert_dtype": "fp4", "quantization_config": QUANTIZATION}


def export(model: DeepseekV4ForCausalLM, folder: Path) -> int:
    """Writes the checkpoint, its configuration and its tokenizer; returns the bytes of all files."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = stored_tensors(model)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private to its writer
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
             "weight_map": dict.fromkeys(sorted(tensors), "model.safetensors")}
    generation = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id,
                  "pad_token_id": model.config.pad_token_id, "do_sample": False, "max_new_tokens": 48}
    for name, content in (("config.json", stored_config(model.config)), ("generation_config.json", generation),
                          ("model.safetensors.index.json", index)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    save_tokenizer(folder)
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def decoded(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The values of one stored tensor, by its dtype."""
    weight = tensors[name]
    if weight.dtype == torch.int8:
        return mxfp4_decode(weight, tensors[name.removesuffix("weight") + "scale"])
    if weight.dtype == torch.float8_e4m3fn:
        return fp8_decode(weight, tensors[name.removesuffix("weight") + "scale"])
    return weight


def load_stored(folder: Path, dtype: torch.dtype = torch.float32) -> DeepseekV4ForCausalLM:
    """A Transformers model that holds the stored values, dequantised; float32 and bfloat16 hold them exactly."""
    folder = Path(folder)
    settings = json.loads((folder / "config.json").read_text())
    settings.pop("quantization_config")
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**settings, attn_implementation="eager"))
    model.config._experts_implementation = "eager"
    tensors, state = read_tensors(folder), {}
    for name, weight in model.state_dict().items():
        target = stored_name(name)
        if storage_of(name) == "mxfp4":
            at, experts = target.rsplit(".", 1)[0], range(model.config.n_routed_experts)
            parts = ("w1", "w3") if name.endswith("gate_up_proj") else ("w2",)
            state[name] = torch.stack([torch.cat([decoded(tensors, f"{at}.{expert}.{part}.weight") for part in parts])
                                       for expert in experts])
        else:
            state[name] = decoded(tensors, target)
        state[name] = state[name].to(weight.dtype)
    model.load_state_dict(state, strict=True)
    return model.to(dtype).eval()


if __name__ == "__main__":
    for tensor_name, tensor in sorted(read_tensors(Path(sys.argv[1])).items()):
        print(f"{tensor_name:48} {tensor.dtype!s:22} {list(tensor.shape)}")
