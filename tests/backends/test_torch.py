"""The torch backend against the float64 oracle, over formats, widths, precisions and every awkward input."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe import Activation, FoldedMoE, Format, FusionPolicy, reference_moe
from foldmoe.backends.torch import linear
from foldmoe.reference import relative_error
from tests.support.cases import (
    CASE_NAMES,
    FLOAT32_TOLERANCE,
    FP8_TOLERANCE,
    assert_close,
    get_case,
    make_layer,
    quantize,
    random_case,
)

if TYPE_CHECKING:
    from foldmoe.planner.policy import ActivationChoice

PAIRS = [
    (Format.MXFP4, Format.FP8_128x128),
    (Format.MXFP4, Format.FP8_32x32),
    (Format.MXFP4, Format.MXFP4),
    (Format.FP8_128x128, Format.FP8_128x128),
    (Format.MXFP8, Format.BF16),
    (Format.NVFP4, Format.FP8_128x128),
    (Format.BF16, Format.BF16),
]

STORED_HALF_TOLERANCE = 5e-3
"""bf16 weights times bf16 inputs: torch rounds both products to bf16 on a CPU. Transformers' own block, at the same
precision, is farther off (`test_bf16_layers_are_closer_than_transformers`)."""


@pytest.mark.parametrize("name", CASE_NAMES)
@pytest.mark.parametrize(("routed_format", "shared_format"), PAIRS)
def test_float32_inputs_match_the_reference(routed_format: Format, shared_format: Format, name: str) -> None:
    routed, shared = make_layer(routed_format, shared_format, experts=6, width=40, shared_width=96, hidden=64)
    case = get_case(name, 13, 3, 6, 64, dtype=torch.float32)
    layer = FoldedMoE(routed, shared, activation=Activation(2.0), policy=FusionPolicy(activations="bf16"))
    y = layer(*case.args, **case.kwargs)
    assert_close(
        y, reference_moe(*case.args, routed, shared, activation=Activation(2.0), **case.kwargs), FLOAT32_TOLERANCE
    )


@pytest.mark.parametrize("fold", ["native", "off"])
@pytest.mark.parametrize("activations", ["fp8", "fp8_token"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_quantised_activations_match_an_oracle_that_quantises_alike(
    name: str, activations: ActivationChoice, fold: str
) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.FP8_128x128, experts=6, width=192, shared_width=288, hidden=256)
    case = get_case(name, 13, 3, 6, 256)
    layer = FoldedMoE(routed, shared, policy=FusionPolicy(fold, activations=activations))  # type: ignore[arg-type]
    truth = reference_moe(*case.args, routed, shared, activations=activations, **case.kwargs)
    assert_close(layer(*case.args, **case.kwargs), truth, FP8_TOLERANCE)


@pytest.mark.parametrize("tokens", [1, 7, 65, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_run_in_half_precision(dtype: torch.dtype, tokens: int) -> None:
    routed, shared = make_layer(Format.BF16, Format.BF16, experts=4, width=96, shared_width=160, hidden=128)
    if dtype is torch.float16:
        routed, shared = (
            replace(w, gate_up=w.gate_up.map(lambda t: t.half()), down=w.down.map(lambda t: t.half()))
            for w in (routed, shared)
        )
    case = random_case(tokens, 2, 4, 128, dtype=dtype)
    y = FoldedMoE(routed, shared)(*case.args)
    assert y.dtype == dtype
    assert_close(y, reference_moe(*case.args, routed, shared), STORED_HALF_TOLERANCE)


def test_bf16_layers_are_closer_than_transformers() -> None:
    stock = pytest.importorskip("foldmoe.bench.stock")
    pytest.importorskip("transformers")
    from foldmoe.bench.shapes import Batch
    from foldmoe.layer import _spec
    from foldmoe.moe import Placement

    routed, shared = make_layer(Format.BF16, Format.BF16, experts=8, width=64, shared_width=64, hidden=128)
    case = random_case(33, 3, 8, 128)
    truth = reference_moe(*case.args, routed, shared)
    mine = relative_error(FoldedMoE(routed, shared)(*case.args), truth)
    spec = _spec("layer", routed, shared, Activation(), Activation(), Placement(), 3, None)
    with torch.inference_mode():
        for arm in stock.transformers_arms(spec, routed, shared).values():
            assert mine < relative_error(arm(Batch(*case.args)), truth)


@pytest.mark.parametrize("format", list(Format))
@pytest.mark.parametrize(("rows", "columns"), [(40, 96), (128, 128), (200, 288)])
def test_the_fast_upcast_gives_the_formats_own_numbers(format: Format, rows: int, columns: int) -> None:
    tensor = quantize(torch.randn(rows, columns), format)
    assert torch.equal(linear.upcast(tensor, torch.float32), tensor.dequantize(torch.float32))


def test_folded_and_serial_agree_to_the_bit() -> None:
    routed, shared = make_layer(Format.MXFP4, Format.FP8_128x128, experts=6, width=64, shared_width=96, hidden=128)
    case = random_case(20, 3, 6, 128)
    folded, serial = (FoldedMoE(routed, shared, policy=FusionPolicy(fold))(*case.args) for fold in ("native", "off"))
    assert torch.equal(folded, serial)


def test_packed_weights_are_the_stored_ones_and_come_back() -> None:
    routed, shared = make_layer(Format.MXFP4, Format.FP8_32x32, experts=3, width=96, shared_width=64, hidden=64)
    layer = FoldedMoE(routed, shared)
    mine, other = layer.unpack()
    assert other is not None
    assert mine.gate_up.values.data_ptr() == routed.gate_up.values.data_ptr()
    assert layer.memory()["weights"] == routed.nbytes + shared.nbytes == layer.memory()["stored"]


def test_at_most_one_expert_is_alive_in_wide_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.FP8_128x128, experts=6, width=64, shared_width=64, hidden=128)
    alive, most = 0, 0
    plain = linear.upcast

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def counting(tensor: object, dtype: torch.dtype) -> torch.Tensor:
        nonlocal alive, most
        alive += 1
        most = max(most, alive)
        return plain(tensor, dtype).as_subclass(Counted)  # type: ignore[arg-type]

    monkeypatch.setattr(linear, "upcast", counting)
    case = random_case(20, 3, 6, 128)
    FoldedMoE(routed, shared)(*case.args)
    assert most >= 1, "the counter saw no upcast"
    assert most <= 2, f"{most} matrices were alive at once; one is multiplied while the next is made, no more"
