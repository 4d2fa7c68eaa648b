"""E8M0: one byte that is a power of two, ``2 ** (byte - 127)``; 255 is NaN.

Source: OCP Microscaling Formats (MX) v1.0, section 5.4.1. Byte 0 is 2**-127, a float32 subnormal, not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

BIAS = 127
NAN_BYTE = 255


def as_bytes(scales: Tensor) -> Tensor:
    """The same storage as uint8, whether it came as uint8, int8 or ``float8_e8m0fnu``.

    Raises:
        TypeError: for any other dtype; an integer scale is never read as a number.
    """
    if scales.dtype == torch.uint8:
        return scales
    if scales.dtype in (torch.float8_e8m0fnu, torch.int8):
        return scales.view(torch.uint8)
    raise TypeError(f"E8M0 scales must be uint8, int8 or float8_e8m0fnu, found {scales.dtype}")


def decode(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Bytes ``[...]`` to numbers ``[...]``: 134 -> 128.0, 0 -> 2**-127, 255 -> NaN."""
    code = as_bytes(scales).to(torch.int32)
    if dtype == torch.float64:
        bits = ((code.to(torch.int64) - BIAS + 1023) << 52).view(torch.float64)
        return torch.where(code == NAN_BYTE, torch.full_like(bits, torch.nan), bits)
    # Built from bits, so that no flush-to-zero mode can lose byte 0: 2**-127 is the subnormal 0x00400000.
    bits32 = torch.where(code == 0, torch.full_like(code, 0x00400000), code << 23)
    bits32 = torch.where(code == NAN_BYTE, torch.full_like(code, 0x7FC00000), bits32)
    return bits32.view(torch.float32).to(dtype)


def encode(values: Tensor) -> Tensor:
    """Positive powers of two ``[...]`` to bytes ``[...]`` (uint8); NaN becomes 255.

    Raises:
        ValueError: if a value is not a power of two between 2**-127 and 2**127.
    """
    mantissa, exponent = torch.frexp(values.to(torch.float64))
    code = exponent.to(torch.int32) - 1 + BIAS
    nan = torch.isnan(values)
    bad = ~nan & ((mantissa != 0.5) | (code < 0) | (code > 254))
    if bool(bad.any()):
        where = [int(i) for i in bad.nonzero()[0]]
        raise ValueError(f"not a power of two that E8M0 can hold: {float(values[tuple(where)])} at {where}")
    return torch.where(nan, torch.full_like(code, NAN_BYTE), code).to(torch.uint8)


def encode_ceil(values: Tensor) -> Tensor:
    """The smallest E8M0 byte whose value is at least ``values`` (>= 0), clamped to the range 2**-127 .. 2**127."""
    mantissa, exponent = torch.frexp(values.to(torch.float64))
    code = exponent.to(torch.int32) + BIAS - (mantissa == 0.5).to(torch.int32)
    return torch.where(values > 0, code, torch.zeros_like(code)).clamp(0, 254).to(torch.uint8)
