"""Tensors outside the experts, from a checkpoint into a Transformers model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from foldmoe.checkpoint.shards import CheckpointError
from foldmoe.formats import QuantizedTensor, refuse_nan
from foldmoe.formats.tensor import detect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any

    from foldmoe.checkpoint.headers import Headers


def load_rest(
    model: Any,
    path: Path,
    headers: Headers,
    rename: Callable[[str], str],
    taken: set[str],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Load every tensor outside the experts.

    Raises:
        CheckpointError: listing all that is missing or unexpected.
    """
    import re

    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    wide = tuple(model._keep_in_fp32_modules_strict or ())
    own = _stored(model)
    state: dict[str, Tensor] = {}
    unexpected = []
    for name, tensor in _numbers(headers, taken):
        key = rename(name)
        if key not in own:
            if not any(pattern.search(name) for pattern in ignored):
                unexpected.append(name)
            continue
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float32 if any(part in key for part in wide) else dtype)
        state[key] = tensor.to(device)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = sorted(set(own) - set(state) - tied - _computed(own))
    if missing or unexpected:
        listed = [f"missing: {n}" for n in missing] + [f"unexpected: {n}" for n in unexpected]
        raise CheckpointError(f"{path}: tensors outside the experts do not fit the model:\n  " + "\n  ".join(listed))
    model.load_state_dict(state, strict=False, assign=True)


def _stored(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name: a state dict's, but folded blocks refuse to be in one."""
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        own = {**dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
        kept = ((name, tensor) for name, tensor in own.items() if name not in module._non_persistent_buffers_set)
        found |= {f"{prefix}.{name}" if prefix else name: tensor for name, tensor in kept}
    return found


def _computed(own: dict[str, Tensor]) -> set[str]:
    """Experts that were filled already."""
    return {name for name, tensor in own.items() if tensor.device.type != "meta" and _is_expert(name)}


def _is_expert(name: str) -> bool:
    return ".experts." in name or ".shared_experts." in name or ".shared_expert." in name


def _numbers(headers: Headers, taken: set[str]) -> Iterator[tuple[str, Tensor]]:
    """(name, numbers) of every tensor that is not taken; scales are consumed by the matrix they belong to."""
    from safetensors import safe_open

    by_shard: dict[str, list[str]] = {}
    for name, header in headers.tensors.items():
        if name not in taken:
            by_shard.setdefault(header.shard, []).append(name)
    scales = {scale: name for name in headers.tensors for scale in _scale_names(name) if scale in headers.tensors}

    assert headers.root is not None
    root = headers.root

    def read(name: str) -> Tensor:
        with safe_open(root / headers.tensors[name].shard, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    for names in by_shard.values():
        for name in names:
            if name in scales:
                continue
            values = read(name)
            scale = next((s for s in _scale_names(name) if s in headers.tensors), None)
            if scale is None:
                yield name, values
                continue
            stored = read(scale)
            kind = detect(values.dtype, values.shape, stored.dtype, stored.shape, values.shape)
            tensor = QuantizedTensor(values, stored, format=kind)
            refuse_nan(tensor, name, scale)
            yield name, tensor.dequantize(torch.float32)


def _scale_names(name: str) -> tuple[str, ...]:
    if not name.endswith(".weight"):
        return ()
    return f"{name[:-7]}.scale", f"{name}_scale_inv", f"{name}_scale"
