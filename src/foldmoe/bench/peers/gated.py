# mypy: ignore-errors
"""The gated activation in one launch, for peers whose library leaves it to the engine."""

import triton
import triton.language as tl
from torch import Tensor

_COLUMNS = 1024


@triton.jit(do_not_specialize=["width"])
def silu_and_mul_kernel(gate_up, y, width, limit, CLAMPED: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid: rows x ceil(width / COLUMNS). gate_up ``[M, 2I]``, y ``[M, I]``."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    gate = tl.load(gate_up + row * 2 * width + n, mask=n < width, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + n, mask=n < width, other=0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(y + row * width + n, value.to(y.dtype.element_ty), mask=n < width)


def silu_and_mul(gate_up: Tensor, limit: float | None) -> Tensor:
    """``silu(gate) * up``, clamped first where there is a limit.

    Args:
        gate_up: ``[M, 2I]``, gate then up, contiguous.
        limit: as :class:`foldmoe.moe.Activation` has it.

    Returns:
        ``[M, I]`` in gate_up's dtype.
    """
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = gate_up.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, _COLUMNS))
    silu_and_mul_kernel[grid](gate_up, y, width, limit or 0.0, CLAMPED=limit is not None, COLUMNS=_COLUMNS)
    return y
