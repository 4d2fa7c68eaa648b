from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foldmoe.formats import e8m0
from tests.support.strategies import all_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_byte_decodes_to_its_power_of_two(dtype: torch.dtype) -> None:
    decoded = e8m0.decode(all_bytes(), dtype)
    assert decoded.dtype == dtype
    assert decoded[:255].to(torch.float64).tolist() == [2.0 ** (byte - 127) for byte in range(255)]
    assert decoded[255].isnan()


def test_every_byte_decodes_as_torch_casts_it() -> None:
    torch.testing.assert_close(
        e8m0.decode(all_bytes()),
        all_bytes().view(torch.float8_e8m0fnu).to(torch.float32),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e8m0fnu])
def test_storage_dtypes_read_alike(dtype: torch.dtype) -> None:
    torch.testing.assert_close(
        e8m0.decode(all_bytes().view(dtype)), e8m0.decode(all_bytes()), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(TypeError, match="must be uint8, int8 or float8_e8m0fnu"):
        e8m0.decode(torch.zeros(4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_encode_is_the_inverse_of_decode_for_every_byte(dtype: torch.dtype) -> None:
    assert torch.equal(e8m0.encode(e8m0.decode(all_bytes(), dtype)), all_bytes())


@pytest.mark.parametrize("value", [3.0, 0.0, -1.0, torch.inf, 2.0**-128, 2.0**128])
def test_encode_refuses_what_is_no_power_of_two_in_range(value: float) -> None:
    with pytest.raises(ValueError, match=r"not a power of two that E8M0 can hold.* at \[1, 2\]"):
        e8m0.encode(
            torch.ones(2, 3, dtype=torch.float64).index_put(
                (torch.tensor(1), torch.tensor(2)), torch.tensor(value, dtype=torch.float64)
            )
        )


@given(st.floats(min_value=2.0**-140, max_value=2.0**127, width=32))
def test_encode_ceil_is_the_smallest_power_of_two_that_is_no_less(value: float) -> None:
    byte = int(e8m0.encode_ceil(torch.tensor(value, dtype=torch.float64)))
    assert 2.0 ** (byte - 127) >= value
    assert byte == 0 or 2.0 ** (byte - 128) < value


def test_encode_ceil_keeps_exact_powers_of_two() -> None:
    powers = e8m0.decode(all_bytes()[:255])
    assert torch.equal(e8m0.encode_ceil(powers), all_bytes()[:255])


def test_encode_ceil_clamps_to_the_range() -> None:
    values = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**127, 2.0**127.5], dtype=torch.float64)
    assert e8m0.encode_ceil(values).tolist() == [0, 0, 0, 254, 254]
