"""The gated activation between an expert's two projections."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan

import torch
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """``silu(gate) * up``, clamped first where a limit is set: gate from above only, up on both sides.

    Source: DeepSeek-V4's ``swiglu_limit``, which holds for routed and shared experts alike.

    Args:
        limit: clamp L > 0; None (or infinity) for none.

    Raises:
        ValueError: for a limit that is not positive.
    """

    limit: float | None = None

    def __post_init__(self) -> None:
        if self.limit is None:
            return
        if isnan(self.limit) or self.limit <= 0:
            raise ValueError(f"an activation limit must be positive (None for no clamp), found {self.limit}")
        object.__setattr__(self, "limit", None if self.limit == inf else float(self.limit))

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Gate and up ``[..., I]`` to ``[..., I]``, in their dtype."""
        if self.limit is not None:
            gate = gate.clamp(max=self.limit)
            up = up.clamp(-self.limit, self.limit)
        return torch.nn.functional.silu(gate) * up
