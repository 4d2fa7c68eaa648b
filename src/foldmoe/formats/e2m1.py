"""E2M1 codes: four bits, magnitudes 0, .5, 1, 1.5, 2, 3, 4, 6 and a sign; two to a byte, low nibble = even column.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3.3.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MAX = 6.0


def as_bytes(packed: Tensor) -> Tensor:
    """Packed codes as uint8, whether stored as uint8, int8 or ``float4_e2m1fn_x2``.

    Raises:
        TypeError: for any other dtype.
    """
    if packed.dtype == torch.uint8:
        return packed
    if packed.dtype in (torch.int8, torch.float4_e2m1fn_x2):
        return packed.view(torch.uint8)
    raise TypeError(f"packed E2M1 must be uint8, int8 or float4_e2m1fn_x2, found {packed.dtype}")


def unpack(packed: Tensor) -> Tensor:
    """Bytes ``[..., K/2]`` to codes ``[..., K]`` (uint8, 0..15)."""
    code = as_bytes(packed)
    return torch.stack((code & 0xF, code >> 4), dim=-1).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Codes ``[..., K]`` (0..15) to bytes ``[..., K/2]``. Inverse of :func:`unpack`.

    Raises:
        ValueError: if K is odd.
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"two codes share a byte: the last dimension must be even, found {codes.shape[-1]}")
    plain = codes.to(torch.uint8)
    return plain[..., 0::2] | (plain[..., 1::2] << 4)


def decode(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Codes (0..15) to numbers of the same shape."""
    table = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=dtype, device=codes.device)
    return table[codes.to(torch.int32)]


def encode(values: Tensor) -> Tensor:
    """Numbers to the nearest codes (ties to the even code), saturating at 6. NaN is the caller's to refuse."""
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], dtype=values.dtype, device=values.device)
    magnitude = values.abs().contiguous()
    below = torch.bucketize(magnitude, midpoints)  # a tie stays on the lower code ...
    tie = (below < 7) & (magnitude == midpoints[below.clamp(max=6)])
    code = below + (tie & (below % 2 == 1)).to(below.dtype)  # ... unless the lower code is odd
    return (code | (torch.signbit(values).to(code.dtype) << 3)).to(torch.uint8)
