"""Stored codes and E4M3 rounding inside kernels, every bit pattern."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from foldmoe.backends.triton.kernels import numbers
from foldmoe.backends.triton.layout import matrix
from foldmoe.formats import Format, QuantizedTensor, fp8
from tests.support.cases import assert_close, random_case
from tests.triton.support import call_of, expected, pack, weights

decode_weight, factor_of, from_bits = numbers.weight, numbers.factor_bits, numbers.from_bits
quantize, amax_of, widen = numbers.quantize, numbers.amax_of, numbers.widen


@triton.jit
def _decode(
    words, scales, y, N: tl.constexpr, BITS: tl.constexpr, PLANES: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr
):
    j = tl.arange(0, N)
    word = tl.load(words + j)
    factor = from_bits(factor_of(tl.load(scales + j), BITS, WIDE))
    for p in tl.static_range(PLANES):
        tl.store(y + j * PLANES + p, decode_weight(word, factor, p, BITS, SCALE, WIDE))


def decode(stored: torch.Tensor, byte: int, bits: int, *, scale: int = 1, wide: bool = False) -> torch.Tensor:
    words = stored.view(torch.int16)
    planes = 16 // bits
    y = torch.empty(len(words) * planes)
    scales = torch.full(words.shape, byte, dtype=torch.uint8)
    _decode[(1,)](words, scales, y, len(words), bits, planes, scale, wide)
    return y


@pytest.mark.parametrize(
    ("byte", "wide"), [(0, False), (1, False), (60, False), (128, False), (0, True), (129, True), (252, True)]
)
def test_every_e2m1_pair_and_scale(byte: int, wide: bool) -> None:
    stored = torch.arange(256, dtype=torch.uint8)
    scales = torch.full((1, 16), byte, dtype=torch.uint8)
    wanted = QuantizedTensor(stored[None], scales, format=Format.MXFP4).dequantize(torch.float64)[0]
    assert torch.equal(decode(stored, byte, 4, wide=wide).to(torch.float64), wanted)


@pytest.mark.parametrize(("byte", "wide"), [(0, False), (100, False), (134, False), (135, True), (245, True)])
def test_every_e4m3_byte_and_scale(byte: int, wide: bool) -> None:
    stored = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    numbers_ = stored.view(torch.float8_e4m3fn).to(torch.float64) * 2.0 ** (byte - 127)
    # Below 2**-133 bf16 ends; products there could not move a float32 sum of anything a layer computes.
    wanted = torch.where(numbers_.abs() < 2.0**-133, decode(stored, byte, 8, wide=wide).to(torch.float64), numbers_)
    assert torch.equal(decode(stored, byte, 8, wide=wide).to(torch.float64), wanted)


def test_e4m3_without_a_folded_scale() -> None:
    stored = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    assert torch.equal(decode(stored, 127, 8, scale=2), stored.view(torch.float8_e4m3fn).to(torch.float32))


@triton.jit
def _round(x, y, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    v = tl.load(x + at)
    tl.store(y + at, quantize(v, amax_of(v, 1)))


def test_rounding_is_the_oracles() -> None:
    rows = torch.randn(64, 128) * torch.exp2(torch.arange(-40.0, 24.0))[:, None]
    edges = 448 * torch.exp2(torch.arange(-10.0, 6.0))  # an amax at, just below and just above a power of two times 448
    for i, edge in enumerate(edges):
        rows[i] *= 0.1 * edge / rows[i].abs().amax()
        rows[i, 0] = edge if i % 3 == 0 else edge.nextafter(torch.tensor(0.0 if i % 3 == 1 else torch.inf))
    rows[60] = 0.0
    rows[61, ::2] = 0.0
    y = torch.empty_like(rows)
    _round[(1,)](rows, y, 64, 128)
    wanted = fp8.dequantize_activations(*fp8.quantize_activations(rows), torch.float32)
    assert torch.equal(y, wanted)


def test_nan_spoils_its_own_group_only() -> None:
    rows = torch.randn(2, 128)
    rows[0, 3] = torch.nan
    y = torch.empty_like(rows)
    _round[(1,)](rows, y, 2, 128)
    assert y[0].isnan().all()
    assert not y[1].isnan().any()


def test_large_scales_take_a_multiplication_of_their_own() -> None:
    """Rows of scales above 2: x and the other matrix are small, so the layer's result is ordinary."""
    routed, shared = weights("mxfp4-mxfp4", 2, 32, 32, 32)
    for experts in (routed, shared):
        stored = experts.gate_up.scales
        assert stored is not None
        stored.view(torch.uint8).add_(20)
        assert matrix(experts.gate_up, "gate_up").wide
    case = random_case(2, 1, 2, 32)
    case.x.mul_(2.0**-20)
    y = pack(routed, shared, "bf16").forward(call_of(case), folded=True)
    assert_close(y, expected(case, routed, shared, "bf16"), 4e-3)
