"""The oracle against the formula, one token and one route at a time in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foldmoe.formats import Format, fp8
from foldmoe.moe import Activation, ExpertWeights
from foldmoe.reference import Precision, reference_moe, relative_error
from tests.support.cases import CASE_NAMES, assert_close, assert_same_bits, get_case, make_layer

EXPERTS, WIDTH, SHARED_WIDTH, HIDDEN, TOP_K, TOKENS = 4, 40, 72, 64, 3, 7


def quantized(v: Tensor, activations: Precision) -> Tensor:
    if activations == "bf16":
        return v
    out = v.clone()
    step = 128 if activations == "fp8" else len(v)
    for start in range(0, len(v), step):
        group = v[start : start + step].to(torch.float32)
        scale = 2.0 ** math.ceil(math.log2(max(float(group.abs().max()), 1e-4) / 448))
        out[start : start + step] = (group / scale).to(torch.float8_e4m3fn).to(torch.float64) * scale
    return out


def expert(x: Tensor, experts: ExpertWeights, index: int, limit: float | None, activations: Precision) -> Tensor:
    gate_up = experts.gate_up.dequantize(torch.float64)[index]
    x = quantized(x.to(torch.float64), activations)
    width = experts.width
    hidden = []
    for i in range(width):
        gate, up = float(gate_up[i] @ x), float(gate_up[width + i] @ x)
        if limit is not None:
            gate, up = min(gate, limit), max(-limit, min(up, limit))
        hidden.append(gate / (1 + math.exp(-gate)) * up)
    act = quantized(torch.tensor(hidden, dtype=torch.float64), activations)
    return experts.down.dequantize(torch.float64)[index] @ act


@pytest.mark.parametrize("name", CASE_NAMES)
@pytest.mark.parametrize(("activations", "limit"), [("bf16", None), ("fp8", 0.5), ("fp8_token", None)])
def test_the_oracle_is_the_formula(name: str, activations: Precision, limit: float | None) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.FP8_128x128, EXPERTS, WIDTH, SHARED_WIDTH, HIDDEN)
    case = get_case(name, TOKENS, TOP_K, EXPERTS, HIDDEN)
    x, ids, weights = case.args
    expected = torch.zeros(x.shape, dtype=torch.float64)
    valid = len(x) if case.num_valid_tokens is None else case.num_valid_tokens
    first, last = case.shared_rows or (0, len(x))
    for m in range(valid):
        for k in range(ids.shape[1]):
            if ids[m, k] >= 0:
                out = expert(x[m], routed, int(ids[m, k]), limit, activations)
                expected[m] += float(weights[m, k]) * case.routed_scale * out
        if first <= m < last:
            weight = 1.0 if case.shared_weights is None else float(case.shared_weights[m])
            expected[m] += weight * expert(x[m], shared, 0, 2 * limit if limit else None, activations)
    found = reference_moe(
        *case.args,
        routed,
        shared,
        **case.kwargs,
        activation=Activation(limit),
        shared_activation=Activation(2 * limit if limit else None),
        activations=activations,
    )
    assert found.dtype == torch.float64
    # act(.) sits on an E4M3 rounding step now and then, where float64 sums in another order fall to the other side
    assert_close(found, expected, 1e-12 if activations == "bf16" else 1e-4)


def test_the_shared_activation_defaults_to_the_routed_one() -> None:
    routed, shared = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED_WIDTH, HIDDEN)
    case = get_case("random", TOKENS, TOP_K, EXPERTS, HIDDEN)
    limit = Activation(0.1)
    both = reference_moe(*case.args, routed, shared, activation=limit)
    assert torch.equal(both, reference_moe(*case.args, routed, shared, activation=limit, shared_activation=limit))
    assert not torch.equal(
        both, reference_moe(*case.args, routed, shared, activation=limit, shared_activation=Activation())
    )


def test_without_a_shared_expert_only_routes_count() -> None:
    routed, _ = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED_WIDTH, HIDDEN)
    case = get_case("no_routes_at_all", TOKENS, TOP_K, EXPERTS, HIDDEN)
    assert (reference_moe(*case.args, routed) == 0).all()


def test_nan_in_one_row_reaches_no_other_row() -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, EXPERTS, WIDTH, WIDTH, HIDDEN)
    case = get_case("random", TOKENS, TOP_K, EXPERTS, HIDDEN)
    clean = reference_moe(*case.args, routed, shared)
    x = case.x.clone()
    x[2] = torch.nan
    found = reference_moe(x, *case.args[1:], routed, shared)
    assert found[2].isnan().all()
    others = torch.arange(TOKENS) != 2
    torch.testing.assert_close(found[others], clean[others], rtol=1e-13, atol=1e-15)


def test_relative_error_is_the_ratio_of_norms() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1)
    assert relative_error(reference, reference) == 0
    assert relative_error(torch.tensor([0.5, 0.0]), torch.zeros(2)) == 0.5
    assert relative_error(torch.empty(0, 4), torch.empty(0, 4)) == 0


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_and_inf_never_pass(bad: float) -> None:
    assert relative_error(torch.tensor([bad, 1.0]), torch.tensor([1.0, 1.0])) == math.inf
    with pytest.raises(AssertionError):
        assert_close(torch.tensor([[bad, 1.0]]), torch.tensor([[1.0, 1.0]]), 1e9)


def test_assert_close_wants_silent_rows_to_be_exactly_zero() -> None:
    reference = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    with pytest.raises(AssertionError, match="rows \\[1\\] must be exactly zero"):
        assert_close(torch.tensor([[1.0, 1.0], [0.0, 1e-9]]), reference, 1e-3)


def test_fp8_activations_cost_what_fp8_costs() -> None:
    routed, shared = make_layer(Format.MXFP4, Format.FP8_128x128, EXPERTS, 256, 256, 256)
    case = get_case("random", 32, TOP_K, EXPERTS, 256)
    exact = reference_moe(*case.args, routed, shared)
    for activations in ("fp8", "fp8_token"):
        error = relative_error(reference_moe(*case.args, routed, shared, activations=activations), exact)
        assert 0.02 < error < 0.06
    assert fp8.ACTIVATION_GROUP == 128


def test_rows_that_differ_are_named() -> None:
    y = torch.randn(6, 4).to(torch.bfloat16)
    y[0, 0] = torch.nan
    other = y.clone()
    assert_same_bits(y, other)
    other[2, 1], other[4, 2] = y[2, 1] + 1, torch.nan
    told = r"call 3: 2 values differ .* in 2 of 6 rows \(\[2, 4\] \.\.\), columns 1 to 2; 1 are"
    with pytest.raises(AssertionError, match=told):
        assert_same_bits(y, other, "call 3")
