"""``Format`` and ``QuantizedTensor``: a matrix as a checkpoint stores it, with all that is needed to read it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foldmoe.formats import blocks, e2m1, e8m0

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_PACKED_DTYPES = (torch.uint8, torch.int8, torch.float4_e2m1fn_x2)
_BYTE_DTYPES = (torch.uint8, torch.int8, torch.float8_e8m0fnu)
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Format(Enum):
    """How numbers are stored. The value is the name used in plans and messages."""

    BF16 = "bf16"
    FP8_128x128 = "fp8_128x128"
    FP8_32x32 = "fp8_32x32"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"

    @property
    def block(self) -> blocks.Block:
        """(rows, columns) that share one scale; (1, 1) for plain floats."""
        return _BLOCKS[self]

    @property
    def packed(self) -> bool:
        """Two values to a byte."""
        return self in (Format.MXFP4, Format.NVFP4)

    @property
    def fp8(self) -> bool:
        """E4M3 values."""
        return self in (Format.FP8_128x128, Format.FP8_32x32, Format.MXFP8)

    @classmethod
    def detect(cls, values: Tensor, scales: Tensor | None, logical_shape: Sequence[int]) -> Format:
        """The format of a stored matrix, from dtypes and shapes alone.

        Args:
            values: as stored, ``[..., N, K]``, or ``[..., N, K/2]`` where two codes share a byte.
            scales: as stored, or None.
            logical_shape: ``[..., N, K]``.

        Raises:
            ValueError: if no format fits; the message lists what each candidate would have needed.
            TypeError: for a value dtype that no format uses.
        """
        if scales is None:
            return detect(values.dtype, values.shape, None, None, logical_shape)
        return detect(values.dtype, values.shape, scales.dtype, scales.shape, logical_shape)


_BLOCKS: dict[Format, blocks.Block] = {
    Format.BF16: (1, 1),
    Format.FP8_128x128: (128, 128),
    Format.FP8_32x32: (32, 32),
    Format.MXFP8: (1, 32),
    Format.MXFP4: (1, 32),
    Format.NVFP4: (1, 16),
}


def detect(
    dtype: torch.dtype,
    shape: Sequence[int],
    scale_dtype: torch.dtype | None,
    scale_shape: Sequence[int] | None,
    logical_shape: Sequence[int],
) -> Format:
    """:meth:`Format.detect` on dtypes and shapes, for callers that hold only a file's header."""
    rows, columns = logical_shape[-2:]
    if dtype in _PLAIN_DTYPES:
        if scale_shape is not None:
            raise ValueError(f"{_name(dtype)} values take no scales, found scales {list(scale_shape)}")
        _expect_shape(shape, (rows, columns), "values")
        return Format.BF16
    if dtype == torch.float8_e4m3fn:
        _expect_shape(shape, (rows, columns), "FP8 values")
        candidates: tuple[Format, ...] = (Format.FP8_128x128, Format.FP8_32x32, Format.MXFP8)
    elif dtype in _PACKED_DTYPES:
        if columns % 2:
            raise ValueError(f"two 4-bit values share a byte: K must be even, found [{rows}, {columns}]")
        _expect_shape(shape, (rows, columns // 2), "packed 4-bit values (two a byte)")
        candidates = (Format.MXFP4, Format.NVFP4)
    else:
        raise TypeError(f"no stored format uses {_name(dtype)} values")
    if scale_dtype is None or scale_shape is None:
        raise ValueError(f"{_name(dtype)} values of shape {list(shape)} need a scale tensor, found none")
    fitting = [f for f in candidates if _scale_fits(f, scale_dtype, scale_shape, rows, columns)]
    if not fitting:
        wanted = ", ".join(f"{f.value} {list(blocks.scale_shape(rows, columns, f.block))}" for f in candidates)
        raise ValueError(
            f"scales {_name(scale_dtype)} {list(scale_shape)} fit no format of a [{rows}, {columns}] matrix; "
            f"expected one of: {wanted}"
        )
    return fitting[0]


def _expect_shape(found: Sequence[int], expected: tuple[int, int], what: str) -> None:
    if tuple(found[-2:]) != expected:
        raise ValueError(f"{what}: found shape {list(found)}, expected [..., {expected[0]}, {expected[1]}]")


def _scale_fits(f: Format, dtype: torch.dtype, shape: Sequence[int], rows: int, columns: int) -> bool:
    return dtype in _scale_dtypes(f) and tuple(shape[-2:]) == blocks.scale_shape(rows, columns, f.block)


def _scale_dtypes(f: Format) -> tuple[torch.dtype, ...]:
    if f is Format.NVFP4:
        return (torch.float8_e4m3fn,)
    if f in (Format.MXFP4, Format.MXFP8):
        return _BYTE_DTYPES
    return (*_BYTE_DTYPES, torch.float32, torch.bfloat16)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix, or a stack of them, as stored: values, scales and how to read them.

    Args:
        values: ``[..., N, K]`` (bf16, fp16, fp32, float8_e4m3fn) or ``[..., N, K/2]`` (packed 4-bit codes).
        scales: ``[..., ceil(N/bn), ceil(K/bk)]``: float32 (a multiplier), E8M0 (float8_e8m0fnu, or uint8 meaning the
            same; integers are never read as numbers), or E4M3 for NVFP4.
        format: how to read them.
        global_scale: NVFP4's one float32 per matrix, shape ``[]`` or the leading dimensions; with one dimension more,
            one for each of that many equal ranges of rows (gate and up that were stored with their own).
        block: (rows, columns) a scale, where it differs from the format's own: a tensor-parallel cut can leave 64.

    Raises:
        ValueError: shapes that do not belong together, or a missing or superfluous scale.
        TypeError: a dtype that the format does not use.
    """

    values: Tensor
    scales: Tensor | None = None
    format: Format = field(kw_only=True)
    global_scale: Tensor | None = field(default=None, kw_only=True)
    block: blocks.Block = field(default=(0, 0), kw_only=True)

    def __post_init__(self) -> None:
        if self.block == (0, 0):
            object.__setattr__(self, "block", self.format.block)
        self._check_dtypes()
        if self.scales is None:
            return
        rows, columns = self.shape[-2:]
        wanted = blocks.scale_shape(rows, columns, self.block)
        if tuple(self.scales.shape[-2:]) != wanted or self.scales.shape[:-2] != self.values.shape[:-2]:
            raise ValueError(
                f"{self.format.value} {list(self.shape)} with {self.block[0]}x{self.block[1]} blocks needs scales "
                f"{[*self.values.shape[:-2], *wanted]}, found {list(self.scales.shape)}"
            )
        if self.global_scale is not None:
            self._check_global(self.global_scale, self.shape[:-2])

    def _check_global(self, found: Tensor, lead: Sequence[int]) -> None:
        if found.dtype != torch.float32:
            raise TypeError(f"{self.format.value} global_scale must be float32, found {_name(found.dtype)}")
        ranges = found.shape[-1] if found.dim() == len(lead) + 1 else 1
        if found.dim() and (tuple(found.shape[: len(lead)]) != tuple(lead) or found.dim() > len(lead) + 1):
            raise ValueError(f"global_scale must be [] or {list(lead)}, found {list(found.shape)}")
        if ranges < 1 or self.shape[-2] % ranges:
            raise ValueError(f"{self.shape[-2]} rows do not divide into {ranges} ranges of one global_scale each")

    def _check_dtypes(self) -> None:
        f, dtype = self.format, self.values.dtype
        allowed = _PACKED_DTYPES if f.packed else (torch.float8_e4m3fn,) if f.fp8 else _PLAIN_DTYPES
        if dtype not in allowed:
            raise TypeError(f"{f.value} values must be one of {[_name(d) for d in allowed]}, found {_name(dtype)}")
        if self.values.dim() < 2:
            raise ValueError(f"expected a matrix or a stack of matrices, found shape {list(self.values.shape)}")
        if (self.scales is None) != (f is Format.BF16):
            raise ValueError(f"{f.value} {'takes no' if f is Format.BF16 else 'needs'} scales")
        if (self.global_scale is None) != (f is not Format.NVFP4):
            raise ValueError(f"{f.value} {'needs' if f is Format.NVFP4 else 'takes no'} global_scale")
        if self.scales is not None:
            kinds = _scale_dtypes(f)
            if self.scales.dtype not in kinds:
                raise TypeError(
                    f"{f.value} scales must be one of {[_name(d) for d in kinds]}, found {_name(self.scales.dtype)}"
                )

    @property
    def shape(self) -> torch.Size:
        """Logical ``[..., N, K]``."""
        *lead, rows, columns = self.values.shape
        return torch.Size((*lead, rows, columns * 2 if self.format.packed else columns))

    @property
    def nbytes(self) -> int:
        """Stored bytes: values, scales and global scales."""
        return sum(t.nbytes for t in (self.values, self.scales, self.global_scale) if t is not None)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def e8m0_scales(self) -> bool:
        """Scales are powers of two, one byte each."""
        return self.scales is not None and self.scales.dtype in _BYTE_DTYPES

    def scale_values(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Scales as numbers, still one a block; NVFP4's global scale is multiplied in.

        Raises:
            ValueError: for a format without scales.
        """
        if self.scales is None:
            raise ValueError(f"{self.format.value} has no scales")
        scales = e8m0.decode(self.scales, dtype) if self.e8m0_scales else self.scales.to(dtype)
        if self.global_scale is None:
            return scales
        factor = self.global_scale.to(dtype)[..., None]
        if self.global_scale.dim() == self.values.dim() - 1:  # one for each range of rows
            factor = factor.expand(*self.global_scale.shape, self.shape[-2] // self.global_scale.shape[-1]).flatten(-2)
        return scales * factor[..., None]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers ``[..., N, K]``: value * scale, computed in float32 (float64 if asked) and rounded once."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        if self.scales is None:
            return self.values.to(dtype)
        plain = e2m1.decode(e2m1.unpack(self.values), wide) if self.format.packed else self.values.to(wide)
        rows, columns = self.shape[-2:]
        return (plain * blocks.expand(self.scale_values(wide), rows, columns, self.block)).to(dtype)

    def map(self, fn: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """Apply ``fn`` to values, scales and global scale alike (``lambda t: t[3]``, ``.to(..)``)."""
        return replace(
            self,
            values=fn(self.values),
            scales=None if self.scales is None else fn(self.scales),
            global_scale=None if self.global_scale is None else fn(self.global_scale),
        )

    def __getitem__(self, expert: int | slice) -> QuantizedTensor:
        """One matrix, or a slice, of a stack; a view."""
        if self.values.dim() < 3:
            raise ValueError("indexing picks matrices out of a stack; this tensor holds one matrix")
        return self.map(lambda t: t if t.dim() == 0 else t[expert])

    def to(self, device: torch.device | str) -> QuantizedTensor:
        return self.map(lambda t: t.to(device))

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by role: ``values``, and ``scales``, ``global_scale`` where the format has them."""
        named = {"values": self.values, "scales": self.scales, "global_scale": self.global_scale}
        return {name: t for name, t in named.items() if t is not None}
