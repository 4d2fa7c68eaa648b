"""Why the GPU tests let one row be further off: the tensor core's sums, emulated, against the oracle."""

import pytest
import torch

from foldmoe.formats import QuantizedTensor, fp8
from foldmoe.reference import relative_error
from tests.hopper.gpu_layers import EXPERTS, TOP_K, Shape
from tests.support.cases import assert_close, get_case
from tests.triton.support import expected, weights

SHAPE = Shape("fp8_32-fp8", 512, 2048, 192)
BITS, GROUP = 13, 16
"""Bits kept behind the leading one of the largest of 16 products and the sum so far. So counted, the errors of four
draws of 64 tokens are at most 1.18e-2 and 5.7e-3 on average; an H200's were 1.19e-2 and 5.7e-3. With 32 products a time
they are at most 4.9e-3.
"""


def tensor_core(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b.T`` of E4M3 values ``[M, K]`` and ``[N, K]`` in float64: addends are cut to a multiple of one step."""
    total = torch.zeros(len(a), len(b), dtype=torch.float64)
    for k in range(0, a.shape[1], GROUP):
        addends = torch.cat((a[:, None, k : k + GROUP] * b[None, :, k : k + GROUP], total[..., None]), -1)
        exponent = torch.frexp(addends.abs().amax(-1, keepdim=True))[1]
        step = torch.exp2((exponent - 1 - BITS).double())
        total = (torch.trunc(addends / step) * step).sum(-1)
    return total


def product(values: torch.Tensor, scales: torch.Tensor, weight: QuantizedTensor) -> torch.Tensor:
    """Sums of 128 columns, each multiplied by its scales and added in float64."""
    rows = torch.arange(len(weight.values)) // (len(weight.values) // len(weight.scales))
    parts = [
        tensor_core(values[:, at : at + 128].double(), weight.values[:, at : at + 128].double())
        * (scales[:, None, at // 128] * weight.scales[rows, at // 128]).double()
        for at in range(0, values.shape[1], 128)
    ]
    return torch.stack(parts).sum(0)


@pytest.fixture(scope="module")
def outputs() -> tuple[torch.Tensor, torch.Tensor]:
    """The shared expert alone, 64 tokens of seed 1: as the tensor core would sum its first projection; the oracle's."""
    routed, shared = weights(SHAPE.pair, EXPERTS, 64, SHAPE.shared_width, SHAPE.hidden)
    case = get_case("no_routes_at_all", 64, TOP_K, EXPERTS, SHAPE.hidden, seed=1)
    gate, up = product(*fp8.quantize_activations(case.x.float(), 128), shared.gate_up[0]).chunk(2, dim=-1)
    values, scales = fp8.quantize_activations((gate * torch.sigmoid(gate) * up).float(), 128)
    y = fp8.dequantize_activations(values, scales, torch.float64) @ shared.down[0].dequantize(torch.float64).T
    return y, expected(case, routed, shared, "fp8")


def test_one_value_beside_a_rounding_boundary_makes_the_error(outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    y, want = outputs
    off = (y - want).norm(dim=-1) / want.norm()
    assert relative_error(y, want) == pytest.approx(1.18e-2, abs=5e-5)
    assert off.max() > 1.1e-2
    assert off.sort().values[:-1].norm() < 4e-3


def test_one_row_may_be_further_off_and_no_second(outputs: tuple[torch.Tensor, torch.Tensor]) -> None:
    y, want = outputs
    allowed = SHAPE.tolerance(64)
    assert_close(y, want, *allowed)
    with pytest.raises(AssertionError, match="allowed"):
        assert_close(y, want, allowed[0])
    second = y.clone()
    second[3] += (y - want)[51].norm() * want[3] / want[3].norm()
    with pytest.raises(AssertionError, match="allowed"):
        assert_close(second, want, *allowed)
    far = y.clone()
    far[51] += want.norm() * 2e-2
    with pytest.raises(AssertionError, match="allowed"):
        assert_close(far, want, *allowed)
