"""Complete small checkpoints in real formats, the same bytes for the same seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import save_file

from foldmoe.checkpoint.generate import deepseek_v4
from foldmoe.checkpoint.generate.recipes import FAMILIES, kimi_int4, tensors

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

KINDS = ("v4", *FAMILIES, "kimi-int4")


def generate(
    kind: str, out: str | Path, *, seed: int = 0, shards: int = 2, size: deepseek_v4.Size | None = None
) -> Path:
    """Write a checkpoint of ``kind`` (one of ``KINDS``) into the folder ``out``.

    Args:
        shards: files that the tensors are spread over, in order.
        size: of kind "v4"; its smallest sensible one by default.

    Raises:
        ValueError: an unknown kind, or a folder that already holds a checkpoint.
    """
    if kind == "v4":
        size = size or deepseek_v4.Size()
        config, named = deepseek_v4.config(size), deepseek_v4.tensors(size, seed)
    elif kind == "kimi-int4":
        config, named = kimi_int4(seed)
    elif kind in FAMILIES:
        config, named = FAMILIES[kind].config, tensors(FAMILIES[kind], seed)
    else:
        raise ValueError(f"unknown kind {kind!r}; there are: {', '.join(KINDS)}")
    return write(out, config, named, shards=shards)


def write(out: str | Path, config: dict[str, Any], named: Iterable[tuple[str, Tensor]], *, shards: int = 1) -> Path:
    """A folder with shards, index and config.json.

    Raises:
        ValueError: if the folder already holds a checkpoint.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} already holds a checkpoint; give another folder")
    pairs = list(named)
    each = -(-len(pairs) // shards)
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = dict(pairs[number * each : (number + 1) * each])
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors"
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(t.nbytes for _, t in pairs)}, "weight_map": weight_map}
    for name, content in (("model.safetensors.index.json", index), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder
