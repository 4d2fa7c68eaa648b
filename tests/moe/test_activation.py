from __future__ import annotations

import math

import pytest
import torch

from foldmoe.moe import Activation


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (20.0, 3.0, silu(10) * 3),
        (-20.0, 3.0, silu(-20) * 3),  # the gate is clamped from above only
        (1.0, 20.0, silu(1) * 10),
        (1.0, -20.0, silu(1) * -10),
        (10.0, -10.0, silu(10) * -10),
        (2.0, 3.0, silu(2) * 3),
    ],
)
def test_a_limit_clamps_the_gate_from_above_and_up_on_both_sides(gate: float, up: float, expected: float) -> None:
    y = Activation(10.0)(torch.tensor(gate, dtype=torch.float64), torch.tensor(up, dtype=torch.float64))
    assert float(y) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("limit", [None, math.inf])
def test_no_limit_clamps_nothing(limit: float | None) -> None:
    activation = Activation(limit)
    assert activation.limit is None
    assert activation == Activation()
    assert float(activation(torch.tensor(1.0), torch.tensor(-1e6))) == pytest.approx(silu(1) * -1e6, rel=1e-6)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, -math.inf])
def test_limits_that_are_not_positive_are_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Activation(limit)


def test_zero_gate_and_up_give_exactly_zero() -> None:
    assert (Activation(7.0)(torch.zeros(3), torch.zeros(3)) == 0).all()


def test_gate_and_up_are_not_interchangeable() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    assert float(Activation()(one, two)) != float(Activation()(two, one))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_result_keeps_the_dtype(dtype: torch.dtype) -> None:
    assert Activation(5)(torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize(("gate", "up"), [(2.0, 3.0), (20.0, 3.0), (-3.0, -20.0), (0.0, 5.0)])
def test_alpha_and_offset_as_gpt_oss_has_them(gate: float, up: float) -> None:
    y = Activation(7.0, 1.702, 1.0)(torch.tensor(gate, dtype=torch.float64), torch.tensor(up, dtype=torch.float64))
    g, u = min(gate, 7.0), max(-7.0, min(up, 7.0))
    assert float(y) == pytest.approx(g / (1 + math.exp(-1.702 * g)) * (u + 1), rel=1e-12)
    assert not Activation(7.0, 1.702, 1.0).is_silu
    assert Activation(7.0).is_silu


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.inf, math.nan])
def test_an_alpha_that_is_not_positive_is_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha must be positive and finite"):
        Activation(alpha=alpha)
