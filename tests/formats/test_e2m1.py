from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foldmoe.formats import e2m1
from tests.support.strategies import all_bytes


def number(code: int) -> float:
    """OCP MX v1.0: sign, two exponent bits with bias 1, one mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
    magnitude = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def test_every_code_decodes_as_the_specification_says() -> None:
    decoded = e2m1.decode(torch.arange(16, dtype=torch.uint8), torch.float64)
    assert decoded.tolist() == [number(code) for code in range(16)]
    assert torch.signbit(decoded[8]), "code 8 is minus zero"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_encode_is_the_inverse_of_decode_for_every_code(dtype: torch.dtype) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(e2m1.encode(e2m1.decode(codes, dtype)), codes)


def test_every_byte_survives_unpack_and_pack() -> None:
    packed = all_bytes().view(16, 16)
    assert torch.equal(e2m1.pack(e2m1.unpack(packed)), packed)


def test_the_low_nibble_is_the_even_column() -> None:
    assert e2m1.unpack(torch.tensor([0xA3], dtype=torch.uint8)).tolist() == [0x3, 0xA]
    assert e2m1.pack(torch.tensor([0x3, 0xA])).tolist() == [0xA3]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float4_e2m1fn_x2])
def test_storage_dtypes_read_alike(dtype: torch.dtype) -> None:
    assert torch.equal(e2m1.unpack(all_bytes().view(dtype)), e2m1.unpack(all_bytes()))


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="must be uint8, int8 or float4_e2m1fn_x2"):
        e2m1.unpack(torch.zeros(4, dtype=dtype))


def test_an_odd_number_of_codes_is_refused() -> None:
    with pytest.raises(ValueError, match="must be even, found 3"):
        e2m1.pack(torch.zeros(2, 3, dtype=torch.uint8))


@given(st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=20))
def test_encode_picks_the_nearest_code_and_on_a_tie_the_even_one(values: list[float]) -> None:
    for value, code in zip(values, e2m1.encode(torch.tensor(values)).tolist(), strict=True):
        distances = [abs(abs(value) - number(c)) for c in range(8)]
        nearest = [c for c in range(8) if distances[c] == min(distances)]
        assert code & 7 == min(nearest, key=lambda c: c % 2)
        assert bool(code & 8) == bool(torch.signbit(torch.tensor(value)))


@pytest.mark.parametrize(("tie", "code"), [(0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)])
def test_ties_go_to_the_even_code(tie: float, code: int) -> None:
    assert e2m1.encode(torch.tensor([tie, -tie])).tolist() == [code, code | 8]


def test_encode_saturates_at_6() -> None:
    assert e2m1.encode(torch.tensor([6.1, 1e30, torch.inf, -torch.inf])).tolist() == [7, 7, 7, 15]
