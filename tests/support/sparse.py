"""Real-sized checkpoints as sparse files: true headers, no bytes on disk behind them."""

from __future__ import annotations

import json
from math import prod
from typing import TYPE_CHECKING, Any

from foldmoe.checkpoint.shards import BITS

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

Fact = tuple[str, str, tuple[int, ...]]


def write_header(path: Path, facts: Iterable[Fact]) -> None:
    """A shard whose tensors read as holes."""
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in facts:
        end = offset + prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        file.truncate(8 + len(raw) + offset)


def expert(at: str, hidden: int, width: int) -> list[Fact]:
    """One MXFP4 expert under DeepSeek-V4's names."""
    facts: list[Fact] = []
    for name, rows, columns in (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width)):
        facts.append((f"{at}.{name}.weight", "I8", (rows, columns // 2)))
        facts.append((f"{at}.{name}.scale", "F8_E8M0", (rows, columns // 32)))
    return facts


def v4_layer(at: str, hidden: int, width: int, experts: int, block: int) -> list[Fact]:
    """One V4 (block 128) or V4.1 (block 32) MoE layer."""
    facts: list[Fact] = [(f"{at}.gate.weight", "BF16", (experts, hidden)), (f"{at}.gate.bias", "F32", (experts,))]
    for number in range(experts):
        facts += expert(f"{at}.experts.{number}", hidden, width)
    for name, rows, columns in (("w1", width, hidden), ("w3", width, hidden), ("w2", hidden, width)):
        facts.append((f"{at}.shared_experts.{name}.weight", "F8_E4M3", (rows, columns)))
        facts.append((f"{at}.shared_experts.{name}.scale", "F8_E8M0", (-(-rows // block), -(-columns // block))))
    return facts


def v4_checkpoint(
    folder: Path, *, hidden: int, width: int, layers: int, experts: int, block: int, drafts: int, draft_experts: int
) -> None:
    """A shard a layer, and config.json."""
    total = layers + drafts
    for layer in range(total):
        at = f"layers.{layer}.ffn" if layer < layers else f"mtp.{layer - layers}.ffn"
        count = experts if layer < layers else draft_experts
        write_header(
            folder / f"model-{layer + 1:05d}-of-{total:05d}.safetensors", v4_layer(at, hidden, width, count, block)
        )
    config = {
        "hidden_size": hidden, "moe_intermediate_size": width, "num_hidden_layers": layers, "n_routed_experts": experts,
        "n_shared_experts": 1, "num_experts_per_tok": 6, "dspark_n_routed_experts": draft_experts,
        "dspark_num_experts_per_tok": 3, "swiglu_limit": 10.0, "hidden_act": "silu", "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [block, block]
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
