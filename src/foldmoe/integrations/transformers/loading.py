"""Load a checkpoint into a Transformers model with its experts left as stored.

The model is built without weights, its MoE blocks are swapped for folded ones that read their experts from the shards
one at a time, and everything else is loaded as Transformers names and converts it; block-FP8 matrices outside the
experts are dequantised, since Transformers' own layers multiply plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from foldmoe.checkpoint import OpaqueLayer, read_headers, read_layers
from foldmoe.checkpoint.shards import CheckpointError
from foldmoe.integrations.transformers.blocks import DTYPES, FoldedBlock, moe_blocks
from foldmoe.integrations.transformers.folding import FoldReport, check_policy
from foldmoe.integrations.transformers.naming import Names
from foldmoe.integrations.transformers.rest import load_rest
from foldmoe.integrations.transformers.twin import Twins
from foldmoe.loading import load_layer
from foldmoe.planner.devices import torch_device
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
        CheckpointError: no such folder; tensors that are missing, unexpected, damaged or of another shape, all listed;
            or a block that does more than a folded one would, by name and with the reason (``fold="stock"`` loads such
            a model).
        TypeError: ``policy`` is no policy, or ``dtype`` none of bfloat16, float16 and float32.
        ValueError: ``device`` is not here, or unknown to torch.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    path = Path(path).expanduser()
    check_policy(policy)
    if dtype not in DTYPES:
        raise TypeError(f"dtype must be torch.bfloat16, torch.float16 or torch.float32, found {dtype!r}")
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; expected one with config.json and .safetensors shards")
    target = torch_device(device)
    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the experts are ours, the rest is dequantised here
    model = _without_weights(lambda: AutoModelForCausalLM.from_config(config, dtype=dtype))
    headers = read_headers(path)
    names = Names(model)
    report, taken = _load_blocks(model, path, headers, names, policy or FusionPolicy(), dtype, target, progress)
    load_rest(model, path, headers, names, taken, dtype, target)
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


def _load_blocks(
    model: Any,
    path: Path,
    headers: Headers,
    names: Names,
    policy: FusionPolicy,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None,
) -> tuple[FoldReport, set[str]]:
    """Fill every MoE block; returns what was decided and the tensor names that it took."""
    blocks = {block.name: block for block in moe_blocks(model)}
    layers = [layer for layer in read_layers(headers) if not layer.block.in_draft]
    report, taken, twins = FoldReport(), set[str](), Twins()
    for done, layer in enumerate(layers):
        router = layer.block.router.get("weight", f"{layer.name}.gate.weight")
        block = blocks.pop(names.find(router)[0].removesuffix(".gate.weight"), None)
        if block is None:  # a draft layer stored among the main ones: Transformers has no module for it
            taken.update(layer.block.names())
            continue
        stock = policy.fold == "stock"
        obstacles = block.obstacles()
        if obstacles:
            raise CheckpointError(f"{block.name}: {'; '.join(obstacles)}")
        scale = 1.0 if stock or isinstance(layer.spec, OpaqueLayer) else twins.routed_scale(block, layer.spec)
        if isinstance(scale, str):
            raise CheckpointError(f"{block.name}: {scale}; FusionPolicy('stock') loads Transformers' own blocks")
        moe = load_layer(headers, layer.name, policy=FusionPolicy(fold="off") if stock else policy, device=device)
        block.module.requires_grad_(False)
        if stock:
            routed, shared = moe.unpack()
            assert shared is not None
            block.restore(routed, shared)
            report.refused[block.name] = ("the policy leaves the engine's own layer in place",)
        else:
            model.set_submodule(block.name, FoldedBlock(block, moe, scale))
            report.plans.append(moe.plan)
        taken.update(set(layer.block.names()) - set(layer.block.router.values()))
        if progress:
            progress(layer.name, done + 1, len(layers))
    if blocks:
        raise CheckpointError(f"{path}: no experts in the shards for {', '.join(sorted(blocks))}")
    return report, taken


def _finish(model: nn.Module, path: Path, device: torch.device) -> None:
    """Move computed buffers to the device and make sure that nothing was left without weights."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != "meta":
                setattr(module, name, buffer.to(device))
    empty = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if empty:
        raise CheckpointError(f"{path}: the shards hold no weights for {', '.join(empty)}")
