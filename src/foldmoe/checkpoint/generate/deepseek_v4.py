"""A whole small DeepSeek-V4 checkpoint: names, formats and config are the real ones, so that engines load it as such.

Shapes follow the published checkpoints; all compression ratios are 0, so every layer attends within its window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foldmoe.checkpoint.generate.experts import Geometry, MoERecipe, Naming, Storage, moe_tensors
from foldmoe.formats import Format

if TYPE_CHECKING:
    from collections.abc import Iterator

QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
NAMING = Naming(("w1", "w3", "w2"), bias="gate.bias")
ROUTED = Storage(Format.MXFP4, scale="scale")
DENSE = Storage(Format.FP8_128x128, e8m0=True, scale="scale")


@dataclass(frozen=True)
class Size:
    """Sizes of a small V4. FP8 matrices must be multiples of 128 both ways, ``head_dim`` 512 and ``rope`` 64.

    Args:
        hash_layers: first layers, whose experts are looked up by token id.
    """

    vocabulary: int = 512
    hidden: int = 256
    width: int = 128
    layers: int = 5
    heads: int = 4
    head_dim: int = 512
    rope: int = 64
    q_rank: int = 128
    o_groups: int = 2
    o_rank: int = 128
    experts: int = 16
    top_k: int = 4
    hash_layers: int = 1
    streams: int = 4
    window: int = 512
    positions: int = 1024


def config(size: Size) -> dict[str, Any]:
    """config.json with the keys of the published checkpoints."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "moe_intermediate_size": size.width,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": 1,
        "head_dim": size.head_dim,
        "qk_rope_head_dim": size.rope,
        "q_lora_rank": size.q_rank,
        "o_groups": size.o_groups,
        "o_lora_rank": size.o_rank,
        "num_experts_per_tok": size.top_k,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "num_hash_layers": size.hash_layers,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "sliding_window": size.window,
        "max_position_embeddings": size.positions,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "compress_ratios": [0] * size.layers,
        "hc_mult": size.streams,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "index_n_heads": 4,
        "index_head_dim": 128,
        "index_topk": 512,
        "num_nextn_predict_layers": 0,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "torch_dtype": "bfloat16",
        "expert_dtype": "fp4",
        "quantization_config": QUANTIZATION,
    }


def tensors(size: Size, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the checkpoint, by stored name."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float) -> Tensor:
        return torch.randn(*shape, generator=random) * std

    h, streams = size.hidden, size.streams
    yield "embed.weight", draw(size.vocabulary, h, std=0.5).to(torch.bfloat16)
    yield "head.weight", draw(size.vocabulary, h, std=h**-0.5).to(torch.bfloat16)
    yield "norm.weight", torch.ones(h, dtype=torch.bfloat16)
    yield "hc_head_fn", draw(streams, streams * h, std=0.01)
    yield "hc_head_base", torch.full((streams,), -1.0)
    yield "hc_head_scale", torch.full((1,), 0.3)
    recipe = MoERecipe(Geometry(h, size.width, size.experts, size.top_k), ROUTED, DENSE, NAMING)
    for layer in range(size.layers):
        at = f"layers.{layer}"
        yield f"{at}.attn_norm.weight", torch.ones(h, dtype=torch.bfloat16)
        yield f"{at}.ffn_norm.weight", torch.ones(h, dtype=torch.bfloat16)
        for place, name in enumerate(("attn", "ffn")):
            yield f"{at}.hc_{name}_fn", draw((2 + streams) * streams, streams * h, std=0.01)
            yield f"{at}.hc_{name}_base", _stream_bases(streams, (2 * layer + place) % streams)
            yield f"{at}.hc_{name}_scale", torch.full((3,), 0.3)
        yield from _attention(f"{at}.attn", size, random)
        for tensor_name, tensor in moe_tensors(f"{at}.ffn", recipe, random):
            if layer < size.hash_layers and tensor_name.endswith(".gate.bias"):
                continue
            yield tensor_name, tensor
        if layer < size.hash_layers:
            chosen = torch.rand(size.vocabulary, size.experts, generator=random).topk(size.top_k).indices
            yield f"{at}.ffn.gate.tid2eid", chosen.sort(dim=-1).values


def _stream_bases(streams: int, own: int) -> Tensor:
    """Each sub-layer favours one stream, so that the residual streams do not stay equal."""
    pre, post = torch.full((streams,), -1.4), torch.full((streams,), -0.5)
    pre[own], post[own] = 0.0, 0.5
    return torch.cat((pre, post, 3.0 * torch.eye(streams).flatten()))


def _attention(at: str, size: Size, random: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    across = size.heads * size.head_dim
    shapes = {
        "wq_a": (size.q_rank, size.hidden),
        "wq_b": (across, size.q_rank),
        "wkv": (size.head_dim, size.hidden),
        "wo_a": (size.o_groups * size.o_rank, across // size.o_groups),
        "wo_b": (size.hidden, size.o_groups * size.o_rank),
    }
    for name, (rows, columns) in shapes.items():
        weight = torch.randn(rows, columns, generator=random) * columns**-0.5
        for suffix, tensor in DENSE.store(weight).items():
            yield f"{at}.{name}.{suffix}", tensor
    yield f"{at}.q_norm.weight", torch.ones(size.q_rank, dtype=torch.bfloat16)
    yield f"{at}.kv_norm.weight", torch.ones(size.head_dim, dtype=torch.bfloat16)
    yield f"{at}.attn_sink", torch.zeros(size.heads)
