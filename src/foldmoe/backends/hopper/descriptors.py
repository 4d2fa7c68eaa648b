"""TMA descriptors of the folded launch; the kernel gets them by value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

if TYPE_CHECKING:
    from torch import Tensor

    from foldmoe.backends.hopper.batch import Weights
    from foldmoe.backends.hopper.heuristics import HopperConfig
    from foldmoe.backends.hopper.workspace import Buffers


def descriptors(layer: Weights, b: Buffers, config: HopperConfig) -> tuple[Any, ...]:
    """The sixteen descriptors of ``folded_moe``.

    Those of the weights are kept. Those of the workspace are not: they would hold its memory.
    """
    if config.warpgroups not in layer.descriptors:
        layer.descriptors[config.warpgroups] = _of_weights(layer, config.warpgroups)
    return (*layer.descriptors[config.warpgroups], *_of_tokens(layer, b, config))


def _of_weights(layer: Weights, warpgroups: int) -> tuple[Any, ...]:
    """Without a shared expert its own are stand-ins of the same type."""
    plain = gl.NVMMASharedLayout(0, 8, 2)
    swizzled = gl.NVMMASharedLayout(128, 8, 2)
    found = []
    for part in (layer.up, layer.down):
        found.append(_describe(part.codes, (part.codes.shape[0], 256), (256, 1), (64, 256), plain))
        found.append(_describe(part.offsets, (part.offsets.shape[0], 256), (256, 1), (4, 256), plain))
    for shared_part in (layer.shared_up, layer.shared_down):
        base = layer.up.codes.view(torch.float8_e4m3fn) if shared_part is None else shared_part.values
        found.append(_describe(base, (base.numel() // 128, 128), (128, 1), (warpgroups * 64, 128), swizzled))
    groups = max(layer.geometry.scale_groups, 1)
    for shared_part in (layer.shared_up, layer.shared_down):
        base = layer.up.references if shared_part is None else shared_part.scales
        shape, box = (base.numel() // 8, 8), (4 * groups, 8)
        found.append(_describe(base, shape, (8, 1), box, gl.NVMMASharedLayout(0, 32, 2)))
    return tuple(found)


def _of_tokens(layer: Weights, b: Buffers, config: HopperConfig) -> tuple[Any, ...]:
    g = layer.geometry
    swizzled = gl.NVMMASharedLayout(128, 8, 2)
    scales = gl.NVMMASharedLayout(0, 32, 2)
    found = []
    total = b.xq.shape[0]
    for width, steps in ((config.tokens, g.k_down4), (config.shared_tokens, max(g.k_down8, 1))):
        span = max(width, 32)
        found.append(_describe(b.xq, (total, g.hidden), (g.hidden, 1), (width, 128), swizzled))
        found.append(_describe(b.xs, (g.k_up, b.row_capacity), (b.row_capacity, 1), (1, span), scales))
        found.append(_describe(b.h, (total, steps * 128), (g.h_stride, 1), (width, 128), swizzled))
        found.append(_describe(b.hs, (steps, b.row_capacity), (b.row_capacity, 1), (1, span), scales))
    return tuple(found)


def _describe(base: Tensor, shape: tuple[int, int], strides: tuple[int, int], box: tuple[int, int], layout: Any) -> Any:
    return TensorDescriptor(base, list(shape), list(strides), list(box), layout)
