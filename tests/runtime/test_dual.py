"""The arm on two streams of backends that have none of their own: an add in float32, rounded once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foldmoe import FoldedMoE, Format, FusionPolicy
from foldmoe.backends import Call, PackedLayer
from tests.support.cases import make_layer, random_case


class Sums(PackedLayer):
    """A routed part that lies between two bf16 numbers, and a shared part that moves the sum onto one."""

    nbytes = 0

    def forward(self, call: Call, *, folded: bool) -> torch.Tensor:
        y = torch.full(call.x.shape, 1 + 2.0**-8)
        return (y + (0 if call.shared_rows == (0, 0) else self.forward_shared(call))).to(call.x.dtype)

    def forward_shared(self, call: Call) -> torch.Tensor:
        return torch.full(call.x.shape, 2.0**-8)

    def unpack(self):  # type: ignore[no-untyped-def]
        raise AssertionError("nothing is stored here")


def test_a_sum_is_rounded_once() -> None:
    call = Call(torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    y = Sums().forward_dual(call, None)
    assert y.dtype == torch.bfloat16
    assert (y == 1 + 2.0**-7).all()
    assert torch.equal(y, Sums().forward(call, folded=False))


@pytest.mark.parametrize("stored", [Format.BF16, Format.MXFP4])
def test_the_torch_backend_gives_its_serial_bits(stored: Format) -> None:
    routed, shared = make_layer(stored, Format.BF16, experts=4, width=32, shared_width=64, hidden=64)
    layer = FoldedMoE(routed, shared, policy=FusionPolicy(backend="torch", activations="bf16")).packed
    case = replace(random_case(40, 2, 4, 64, dtype=torch.bfloat16), routed_scale=1.7, shared_rows=(3, 31))
    call = Call(*case.args, **case.kwargs)
    for valid in (None, 17, 0):
        part = replace(call, num_valid_tokens=valid)
        assert torch.equal(layer.forward_dual(part, None), layer.forward(part, folded=False))
