"""The gated activation between an expert's two projections."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isnan

import torch
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """``gate * sigmoid(alpha * gate) * (up + up_offset)``, ``silu(gate) * up`` unless told otherwise.

    Clamped first where a limit is set: gate from above only, up on both sides.

    Source: DeepSeek-V4's ``swiglu_limit``, which holds for routed and shared experts alike; gpt-oss's "swigluoai",
    which MiniMax-M3 has too: alpha 1.702, up_offset 1.

    Args:
        limit: clamp L > 0; None (or infinity) for none.
        alpha: slope of the sigmoid, above 0.
        up_offset: added to the clamped up.

    Raises:
        ValueError: for a limit or an alpha that is not positive.
    """

    limit: float | None = None
    alpha: float = 1.0
    up_offset: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.alpha < inf:
            raise ValueError(f"an activation's alpha must be positive and finite, found {self.alpha}")
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
        gated = torch.nn.functional.silu(gate) if self.alpha == 1 else gate * torch.sigmoid(self.alpha * gate)
        return gated * (up + self.up_offset if self.up_offset else up)

    @property
    def is_silu(self) -> bool:
        """``silu(gate) * up``, clamped or not: what the GPU kernels compute."""
        return self.alpha == 1 and not self.up_offset
