"""How one token travels: a row of bytes with its routes and its activations.

| field | bytes | |
| --- | --- | --- |
| ids | 4 K | int32, physical experts (slots, between torch expressions) over all ranks; -1 for none |
| weights | 4 K | float32 |
| values | H, or H times the size of x's dtype | E4M3 where the layer is fp8, else x as it is |
| scales | ceil(H / 128), or 1, or none | E8M0: the scales are powers of two |

Rows are padded to 16 bytes, so that every field of every row is aligned for its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.formats import e8m0, fp8

if TYPE_CHECKING:
    from foldmoe.moe.spec import ActivationPrecision

ALIGNMENT = 16


@dataclass(frozen=True)
class Wire:
    """The row layout of one layer.

    Args:
        hidden: H.
        top_k: K, routed ids a token; a shared route never travels.
        activations: the layer's precision; fp8 and fp8_token travel as E4M3.
        dtype: of x.
    """

    hidden: int
    top_k: int
    activations: ActivationPrecision
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Columns that share a scale; 0 where x travels as it is."""
        return {"bf16": 0, "fp8": fp8.ACTIVATION_GROUP, "fp8_token": max(self.hidden, 1)}[self.activations]

    @property
    def _fields(self) -> tuple[int, int, int, int]:
        """Ends of the fields."""
        routes = 8 * self.top_k
        values = self.hidden * (1 if self.group else self.dtype.itemsize)
        scales = -(-self.hidden // self.group) if self.group else 0
        return 4 * self.top_k, routes, routes + values, routes + values + scales

    @property
    def row_bytes(self) -> int:
        return -(-self._fields[-1] // ALIGNMENT) * ALIGNMENT

    def pack(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """``x [M, H]``, ``ids [M, K]``, ``weights [M, K]`` to rows ``[M, row_bytes]`` uint8."""
        parts = [ids.to(torch.int32), weights.to(torch.float32)]
        if self.group:
            values, scales = fp8.quantize_activations(x, self.group)
            parts += [values, e8m0.encode_ceil(scales)]
        else:
            parts.append(x)
        parts.append(torch.zeros(len(x), self.row_bytes - self._fields[-1], dtype=torch.uint8, device=x.device))
        return torch.cat([as_bytes(part) for part in parts], dim=1)

    def unpack(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Inverse of :meth:`pack`: ``x [M, H]`` in ``dtype``, ``ids [M, K]`` int32, ``weights [M, K]`` float32.

        E4M3 times its scale is exact in bf16 and float32, and quantises to the same numbers again: the layer that gets
        x rounds nothing a second time.
        """
        a, b, c, d = self._fields
        ids = rows[:, :a].contiguous().view(torch.int32)
        weights = rows[:, a:b].contiguous().view(torch.float32)
        values = rows[:, b:c].contiguous()
        if not self.group:
            return values.view(self.dtype).to(dtype), ids, weights
        scales = e8m0.decode(rows[:, c:d].contiguous())
        x = fp8.dequantize_activations(values.view(torch.float8_e4m3fn), scales, group=self.group)
        return x.to(dtype), ids, weights

    def blank(self, count: int, device: torch.device) -> Tensor:
        """``count`` rows that hold no token: x is zero and no id is an expert's."""
        rows = torch.zeros(count, self.row_bytes, dtype=torch.uint8, device=device)
        rows[:, : self._fields[0]] = 0xFF  # int32 -1
        return rows


def as_bytes(rows: Tensor) -> Tensor:
    """``[N, ...]`` of any dtype to ``[N, bytes]`` uint8, over the same memory where the rows lie one after another."""
    rows = rows.contiguous().flatten(1)
    # A tensor without elements, or a single column, is contiguous whatever its strides say, and view() looks at them.
    return rows.as_strided(rows.shape, (max(rows.shape[1], 1), 1)).view(torch.uint8)
