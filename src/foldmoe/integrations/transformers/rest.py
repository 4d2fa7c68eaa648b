"""Tensors outside the experts, from a checkpoint into a Transformers model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from foldmoe.checkpoint.shards import CheckpointError
from foldmoe.formats import QuantizedTensor, refuse_nan
from foldmoe.formats.tensor import detect
from foldmoe.integrations.transformers.converting import Conversions
from foldmoe.integrations.transformers.naming import ordered

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path
    from typing import Any

    from foldmoe.checkpoint.headers import Headers
    from foldmoe.integrations.transformers.naming import Names


def load_rest(
    model: Any,
    path: Path,
    headers: Headers,
    names: Names,
    taken: set[str],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Load every tensor outside the experts, converted as Transformers does.

    Raises:
        CheckpointError: listing all that is missing, unexpected, of another shape, there twice or not convertible.
    """
    import re

    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()]
    arrived = _Arrived(model, dtype, device)
    conversions = Conversions(model, names)
    for name, tensor in _numbers(headers, taken):
        key, pattern = names.find(name)
        if key not in arrived.own:
            if not any(expression.search(name) for expression in ignored):
                arrived.misfits.append(f"unexpected: {name}")
        elif pattern is None:
            arrived.put(key, tensor, [name])
        else:
            conversions.add(name, tensor, key, pattern)
    for key, sources in conversions:
        try:
            made = conversions.convert(key)
        except Exception as error:  # operations of Transformers raise what they like
            arrived.fail(key, sources, error)
            continue
        for target, tensor in made.items():
            arrived.put(target, tensor, sources)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = set(arrived.own) - set(arrived.sources) - tied - _computed(arrived.own)
    if listed := [f"missing: {name}" for name in sorted(missing)] + arrived.misfits:
        raise CheckpointError(f"{path}: tensors outside the experts do not fit the model:\n  " + "\n  ".join(listed))
    model.load_state_dict(arrived.state, strict=False, assign=True)


class _Arrived:
    """Tensors that fit the model, in its dtypes and on its device, and a line for each that does not."""

    def __init__(self, model: Any, dtype: torch.dtype, device: torch.device) -> None:
        self.own = _stored(model)
        self.state: dict[str, Tensor] = {}
        self.sources: dict[str, list[str]] = {}
        self.misfits: list[str] = []
        self._wide = tuple(model._keep_in_fp32_modules_strict or ())
        self._dtype = dtype
        self._device = device

    def put(self, key: str, tensor: Tensor, sources: list[str]) -> None:
        """Keep a parameter or buffer that was made from the checkpoint's ``sources``."""
        origin = ", ".join(sources)
        if key not in self.own:
            self.misfits.append(f"unexpected: {key}, made from {origin}")
            return
        if key in self.sources:
            self.misfits.append(f"twice: {key}, from {', '.join(self.sources[key])} and from {origin}")
            return
        self.sources[key] = sources
        if tensor.shape != self.own[key].shape:
            shapes = f"expected {list(self.own[key].shape)}, found {list(tensor.shape)}"
            self.misfits.append(f"of another shape: {key}, {shapes} from {origin}")
            return
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float32 if any(part in key for part in self._wide) else self._dtype)
        self.state[key] = tensor.to(self._device)

    def fail(self, key: str, sources: list[str], error: Exception) -> None:
        """Note a conversion that raised; ``key`` is not missing."""
        self.sources.setdefault(key, sources)
        self.misfits.append(f"not convertible: {', '.join(sources)} to {key}, {type(error).__name__}: {error}")


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

    scales = {scale for name in headers.tensors for scale in _scale_names(name) if scale in headers.tensors}

    assert headers.root is not None
    root = headers.root

    def read(name: str) -> Tensor:
        with safe_open(root / headers.tensors[name].shard, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    for name in ordered([name for name in headers.tensors if name not in taken and name not in scales]):
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
