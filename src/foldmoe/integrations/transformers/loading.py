"""Load a checkpoint into a Transformers model with its experts left as stored.

The model is built without weights, its MoE blocks are swapped for folded ones that read their experts from the shards
one at a time, and everything else is loaded as Transformers names it; block-FP8 matrices outside the experts are
dequantised, since Transformers' own layers multiply plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foldmoe.checkpoint import read_headers, read_layers
from foldmoe.checkpoint.shards import CheckpointError
from foldmoe.formats import QuantizedTensor, refuse_nan
from foldmoe.formats.tensor import detect
from foldmoe.integrations.transformers.blocks import FoldedBlock, moe_blocks
from foldmoe.integrations.transformers.folding import FoldReport
from foldmoe.loading import load_layer
from foldmoe.planner.policy import FusionPolicy

if TYPE_CHECKING:
    from foldmoe.checkpoint.headers import Headers

Progress = Callable[[str, int, int], None]


def load(
    path: str | Path,
    policy: FusionPolicy | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    quiet: bool = False,
    progress: Progress | None = None,
) -> Any:
    """A Transformers model for causal language modelling, its MoE blocks folded as ``policy`` says.

    Args:
        path: a folder with config.json and .safetensors shards.
        policy: see :class:`foldmoe.FusionPolicy`; ``fold="stock"`` gives Transformers' own blocks, dequantised.
        dtype: of everything that is not stored in 4 or 8 bits.
        device: where the model goes; the GPU if there is one.
        quiet: do not print the summary.
        progress: called with (layer, done, total) as layers load.

    Returns:
        The model in eval mode; ``model.fold_report`` says what became of each block.

    Raises:
        CheckpointError: tensors that are missing, unexpected or damaged, all listed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    path = Path(path)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the experts are ours, the rest is dequantised here
    model = _without_weights(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))
    headers = read_headers(path)
    rename = _renamer(model)
    report, taken = _load_blocks(model, path, headers, rename, policy or FusionPolicy(), dtype, target, progress)
    _load_rest(model, path, headers, rename, taken, dtype, target)
    model.tie_weights()
    _finish(model, path, target)
    if (path / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.fold_report = report
    if not quiet:
        report.print()
    return model.requires_grad_(False).eval()


def _without_weights(build: Callable[[], Any]) -> Any:
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):  # rotary tables are buffers, computed here and stored nowhere
        return build()


def _renamer(model: Any) -> Callable[[str], str]:
    """Checkpoint names to the model's own, by Transformers' own tables."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    own = model.state_dict()

    def rename(name: str) -> str:
        renamed: str = rename_source_key(name, renamings, converters, model.base_model_prefix, own)[0]
        return renamed

    return rename


def _load_blocks(
    model: Any,
    path: Path,
    headers: Headers,
    rename: Callable[[str], str],
    policy: FusionPolicy,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> tuple[FoldReport, set[str]]:
    """Fill every MoE block; returns what was decided and the tensor names that it took."""
    blocks = {block.name: block for block in moe_blocks(model)}
    layers = [layer for layer in read_layers(headers) if not layer.block.in_draft]
    report, taken = FoldReport(), set[str]()
    for done, layer in enumerate(layers):
        router = layer.block.router.get("weight", f"{layer.name}.gate.weight")
        block = blocks.pop(rename(router).removesuffix(".gate.weight"), None)
        if block is None:  # a draft layer stored among the main ones: Transformers has no module for it
            taken.update(layer.block.names())
            continue
        stock = policy.fold == "stock"
        moe = load_layer(headers, layer.name, policy=FusionPolicy(fold="off") if stock else policy, device=device)
        obstacles = block.obstacles()
        if obstacles:
            raise CheckpointError(f"{block.name}: {'; '.join(obstacles)}")
        if stock:
            routed, shared = moe.unpack()
            assert shared is not None
            block.restore(routed, shared, dtype)
            report.refused[block.name] = ("the policy leaves the engine's own layer in place",)
        else:
            model.set_submodule(block.name, FoldedBlock(block, moe))
            report.plans.append(moe.plan)
        taken.update(set(layer.block.names()) - set(layer.block.router.values()))
        if progress:
            progress(layer.name, done + 1, len(layers))
    if blocks:
        raise CheckpointError(f"{path}: no experts in the shards for {', '.join(sorted(blocks))}")
    return report, taken


def _load_rest(
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
    own = model.state_dict()
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
    missing = sorted(set(own) - set(state) - tied - _computed(model))
    if missing or unexpected:
        listed = [f"missing: {n}" for n in missing] + [f"unexpected: {n}" for n in unexpected]
        raise CheckpointError(f"{path}: tensors outside the experts do not fit the model:\n  " + "\n  ".join(listed))
    model.load_state_dict(state, strict=False, assign=True)


def _computed(model: nn.Module) -> set[str]:
    """Weights that the swapped blocks' stock parts no longer need, or that were filled already."""
    return {name for name, tensor in model.state_dict().items() if tensor.device.type != "meta" and _is_expert(name)}


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


def _finish(model: nn.Module, path: Path, device: torch.device) -> None:
    """Move computed buffers to the device and make sure that nothing was left without weights."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != "meta":
                setattr(module, name, buffer.to(device))
    empty = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if empty:
        raise CheckpointError(f"{path}: the shards hold no weights for {', '.join(empty)}")
