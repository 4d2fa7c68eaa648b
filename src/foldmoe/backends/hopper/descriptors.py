"""TMA descriptors of the folded launch; the kernel gets them by value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from foldmoe.backends.hopper.pack import PackedRouted

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.backends.hopper.batch import Weights
    from foldmoe.backends.hopper.heuristics import HopperConfig
    from foldmoe.backends.hopper.pack_bf16 import PackedBf16
    from foldmoe.backends.hopper.pack_fp8 import PackedFp8
    from foldmoe.backends.hopper.workspace import Buffers


def descriptors(layer: Weights, b: Buffers, config: HopperConfig) -> tuple[Any, ...]:
    """The sixteen descriptors of ``folded_moe``, kept with what they describe: weights and workspace."""
    if config.warpgroups not in layer.descriptors:
        layer.descriptors[config.warpgroups] = _of_weights(layer, config.warpgroups)
    g = layer.geometry
    key = (config.tokens, config.shared_tokens, g.step, g.k_down4, g.k_down8)
    if key not in b.described:
        b.described[key] = _of_tokens(layer, b, config)
    return (*layer.descriptors[config.warpgroups], *b.described[key])


def _of_weights(layer: Weights, warpgroups: int) -> tuple[Any, ...]:
    """Without a shared expert its own are stand-ins of the same type; so are the scales of bf16 weights."""
    g, plain = layer.geometry, gl.NVMMASharedLayout(0, 8, 2)
    found = []
    for part in (layer.up, layer.down):
        if isinstance(part, PackedRouted):
            found.append(_describe(part.codes, (part.codes.shape[0], 256), (256, 1), (64, 256), plain))
            found.append(_describe(part.offsets, (part.offsets.shape[0], 256), (256, 1), (4, 256), plain))
        else:
            found += [_units(part.values, 256), _group_scales(part, g.routed_groups)]
    for shared_part in (layer.shared_up, layer.shared_down):
        if shared_part is not None:
            base = shared_part.values
        else:
            part = layer.up
            base = part.codes.view(torch.float8_e4m3fn).view(-1, 128) if isinstance(part, PackedRouted) else part.values
        found.append(_units(base, 256 if g.whole else warpgroups * 64))
    for shared_part in (layer.shared_up, layer.shared_down):
        found.append(_group_scales(shared_part or layer.up, g.scale_groups))
    return tuple(found)


def _group_scales(part: PackedRouted | PackedFp8 | PackedBf16, groups: int) -> Any:
    """FP8 scales of four units, ``groups`` rows of 8 each."""
    base = part.factors.view(torch.float32)
    layout = gl.NVMMASharedLayout(0, 32, 2)
    return _describe(base, (base.numel() // 8, 8), (8, 1), (4 * max(groups, 1), 8), layout)


def _units(values: Tensor, rows: int) -> Any:
    """That many rows of FP8 or bf16 weights, 128 bytes each."""
    total, step = values.shape
    return _describe(values, (total, step), (step, 1), (rows, step), _swizzled(values))


def _swizzled(values: Tensor) -> Any:
    return gl.NVMMASharedLayout(128, 8 * values.element_size(), 2)


def _of_tokens(layer: Weights, b: Buffers, config: HopperConfig) -> tuple[Any, ...]:
    g = layer.geometry
    swizzled = _swizzled(b.xq)
    scales = gl.NVMMASharedLayout(0, 32, 2)
    found = []
    total = b.xq.shape[0]
    for width, steps in ((config.tokens, g.k_down4), (config.shared_tokens, max(g.k_down8, 128 // g.step))):
        span = max(width, 32)
        found.append(_describe(b.xq, (total, g.hidden), (g.hidden, 1), (width, g.step), swizzled))
        found.append(_describe(b.xs, (g.hidden // 128, b.row_capacity), (b.row_capacity, 1), (1, span), scales))
        found.append(_describe(b.h, (total, steps * g.step), (g.h_stride, 1), (width, g.step), swizzled))
        found.append(_describe(b.hs, (steps * g.step // 128, b.row_capacity), (b.row_capacity, 1), (1, span), scales))
    return tuple(found)


def _describe(base: Tensor, shape: tuple[int, int], strides: tuple[int, int], box: tuple[int, int], layout: Any) -> Any:
    return TensorDescriptor(base, list(shape), list(strides), list(box), layout)
