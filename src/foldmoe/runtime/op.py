"""One ``torch.library`` op for a whole layer, so that ``torch.compile`` sees a single opaque call with a known shape.

A layer registers its forward once and passes the handle; the op looks it up again when it runs.
"""

from __future__ import annotations

from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor


class Owner(Protocol):
    """A layer that the op can run."""

    def run(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        shared_weights: Tensor | None,
        routed_scale: float,
        num_valid_tokens: int | Tensor | None,
        shared_rows: tuple[int, int] | Tensor | None,
    ) -> Tensor: ...


_layers: WeakValueDictionary[int, Owner] = WeakValueDictionary()
_handles = count()


def register(layer: Owner) -> int:
    """A handle for ``layer``, valid as long as the layer lives."""
    handle = next(_handles)
    _layers[handle] = layer
    return handle


@torch.library.custom_op("foldmoe::moe", mutates_args=())
def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    shared_weights: Tensor | None,
    routed_scale: float,
    num_valid_tokens: Tensor | None,
    shared_rows: Tensor | None,
    handle: int,
) -> Tensor:
    """Run the layer behind ``handle``; see :meth:`foldmoe.FoldedMoE.forward`."""
    layer = _layers[handle]
    return layer.run(x, topk_ids, topk_weights, shared_weights, routed_scale, num_valid_tokens, shared_rows)


@moe.register_fake
def _(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    shared_weights: Tensor | None,
    routed_scale: float,
    num_valid_tokens: Tensor | None,
    shared_rows: Tensor | None,
    handle: int,
) -> Tensor:
    return x.new_empty(x.shape)  # contiguous, whatever x is
