"""Token rows: packed and unpacked again, and FP8 activations that are never rounded twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foldmoe.formats import fp8
from foldmoe.parallel.wire import ALIGNMENT, Wire

ACTIVATIONS = ("bf16", "fp8", "fp8_token")


@given(
    st.sampled_from(ACTIVATIONS),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    st.sampled_from([1, 2, 31, 128, 160, 257]),
    st.integers(0, 9),
    st.integers(0, 4),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_rows_round_trip(
    activations: str, dtype: torch.dtype, hidden: int, top_k: int, tokens: int, id_dtype: torch.dtype
) -> None:
    wire = Wire(hidden, top_k, activations, dtype)  # type: ignore[arg-type]
    x = torch.randn(tokens, hidden).to(dtype)
    ids = torch.randint(-1, 1000, (tokens, top_k), dtype=id_dtype)
    weights = torch.rand(tokens, top_k)
    rows = wire.pack(x, ids, weights)
    assert rows.shape == (tokens, wire.row_bytes)
    assert wire.row_bytes % ALIGNMENT == 0
    back, found_ids, found_weights = wire.unpack(rows, torch.float32)
    assert torch.equal(found_ids, ids.to(torch.int32))
    assert torch.equal(found_weights, weights)
    expected = x.to(torch.float32)
    if activations != "bf16":
        group = None if activations == "fp8_token" else fp8.ACTIVATION_GROUP
        expected = fp8.dequantize_activations(*fp8.quantize_activations(x, group))
    assert torch.equal(back, expected)
    for number in range(tokens):  # a row alone, at an address that is no multiple of anything but the row
        assert torch.equal(wire.unpack(rows[number : number + 1], torch.float32)[0], back[number : number + 1])


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_strides_that_say_nothing_do_not_matter(activations: str, tokens: int) -> None:
    """One column counts as contiguous, at any stride: of a product without rows, a slice, a transposed matrix."""
    wire = Wire(32, 1, activations, torch.float32)  # type: ignore[arg-type]
    x, ids, weights = torch.randn(tokens, 32), torch.randint(0, 9, (tokens, 1)), torch.rand(tokens, 1)
    rows = wire.pack(x, ids, weights)
    for stride in (0, 1, tokens, 7):
        odd = weights.as_strided((tokens, 1), (1, stride))
        assert torch.equal(wire.pack(x, ids.to(torch.int32).as_strided((tokens, 1), (1, stride)), odd), rows)
    assert torch.equal(wire.pack(x, ids, weights * 2.5), wire.pack(x, ids, (weights * 2.5).clone()))
    assert torch.equal(wire.pack(x, ids, weights.t().contiguous().t()), rows)


@pytest.mark.parametrize("activations", ["fp8", "fp8_token"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_layer_rounds_nothing_a_second_time(activations: str, dtype: torch.dtype) -> None:
    """Amax values around every decision: the floor of 1e-4, 224 / 448 where the scale halves, and all magnitudes."""
    wire = Wire(256, 0, activations, dtype)  # type: ignore[arg-type]
    group = None if activations == "fp8_token" else fp8.ACTIVATION_GROUP
    amax = torch.cat(
        (torch.logspace(-8, 30, 2000), 448 * 2.0 ** torch.arange(-30, 60), 224.0 + torch.linspace(-9, 9, 999))
    )
    amax = torch.cat((amax, 1e-4 * torch.linspace(0.9, 1.1, 999)))
    x = (torch.rand(len(amax), 256) * 2 - 1) * amax[:, None]
    x[:, 0], x[:, 128] = amax, -amax
    x[:, 1] = 0.0
    none = torch.zeros(len(x), 0)
    once, *_ = wire.unpack(wire.pack(x.to(dtype), none.long(), none), dtype)
    again = fp8.dequantize_activations(*fp8.quantize_activations(once, group))
    assert torch.equal(again, once.to(torch.float32)), "E4M3 times a power of two quantises to itself"
    assert torch.equal(
        once.to(torch.float32), fp8.dequantize_activations(*fp8.quantize_activations(x.to(dtype), group))
    )


def test_nan_stays_in_its_row_and_blank_rows_hold_no_token() -> None:
    wire = Wire(160, 2, "fp8", torch.bfloat16)
    x = torch.randn(3, 160).to(torch.bfloat16)
    x[1, 5] = torch.nan
    ids, weights = torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
    back, *_ = wire.unpack(wire.pack(x, ids, weights), torch.float32)
    assert torch.isnan(back).any(dim=1).tolist() == [False, True, False]
    x0, ids0, weights0 = wire.unpack(wire.blank(2, torch.device("cpu")), torch.float32)
    assert (ids0 == -1).all()
    assert not x0.any()
    assert not weights0.any()


def test_fp8_rows_take_about_half_the_bytes() -> None:
    rows = {name: Wire(4096, 6, name, torch.bfloat16).row_bytes for name in ACTIVATIONS}  # type: ignore[arg-type]
    assert rows == {"bf16": 8240, "fp8": 4176, "fp8_token": 4160}
