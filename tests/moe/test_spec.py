from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import Activation, ExpertSpec, ExpertWeights, LayerSpec, Placement
from tests.support.cases import ODD_WIDTHS, make_experts, quantize
from tests.support.strategies import FP8_FORMATS

HIDDEN = 96


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("width", ODD_WIDTHS)
@pytest.mark.parametrize("e8m0_scales", [True, False])
def test_nbytes_are_those_of_the_three_stored_matrices(format: Format, width: int, e8m0_scales: bool) -> None:
    e8m0_scales = e8m0_scales or format is Format.MXFP8
    shapes = ((width, HIDDEN), (width, HIDDEN), (HIDDEN, width))
    stored = [quantize(torch.randn(s), format, e8m0_scales=e8m0_scales) for s in shapes]
    spec = ExpertSpec(5, width, format, e8m0_scales=e8m0_scales and format.fp8)
    assert spec.nbytes(HIDDEN) == sum(matrix.nbytes for matrix in stored)


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize(("width", "parts"), [(64, 1), (80, 2), (384, 2), (576, 2), (1280, 4)])
def test_a_spec_made_of_weights_says_what_they_hold_whole_and_cut(format: Format, width: int, parts: int) -> None:
    experts = make_experts(format, 2, width, HIDDEN)
    for rank in range(parts):
        part = experts.shard(rank, parts)
        spec = ExpertSpec.of(part)
        assert (spec.count, spec.width, spec.format) == (2, width // parts, format)
        assert spec.nbytes(HIDDEN) * 2 == part.nbytes
        assert spec == ExpertSpec.of(experts).shard(parts)


@pytest.mark.parametrize("format", [Format.FP8_128x128, Format.FP8_32x32])
def test_bf16_scales_are_counted_as_two_bytes(format: Format) -> None:
    experts = make_experts(format, 1, 128, 128, e8m0_scales=False)
    halved = ExpertWeights(*(replace(t, scales=t.scales.to(torch.bfloat16)) for t in (experts.gate_up, experts.down)))
    spec = ExpertSpec.of(halved)
    assert spec.float_bytes == 2
    assert spec.nbytes(128) == halved.nbytes


def test_float32_values_are_counted_as_four_bytes() -> None:
    gate_up, down = (QuantizedTensor(torch.zeros(1, *s), format=Format.BF16) for s in ((128, 32), (32, 64)))
    experts = ExpertWeights(gate_up, down)
    assert ExpertSpec.of(experts).nbytes(32) == experts.nbytes == 4 * 3 * 64 * 32


@pytest.mark.parametrize("format", [Format.MXFP4, Format.MXFP8])
def test_mx_formats_always_have_power_of_two_scales(format: Format) -> None:
    assert ExpertSpec(1, 64, format).e8m0_scales


@pytest.mark.parametrize(
    ("width", "parts", "block"), [(3072, 16, 64), (1280, 4, 64), (576, 2, 32), (2048, 8, 128), (40, 1, 128)]
)
def test_a_cut_scale_block_becomes_the_greatest_common_divisor(width: int, parts: int, block: int) -> None:
    shard = ExpertSpec(1, width, Format.FP8_128x128).shard(parts)
    assert (shard.width, shard.block) == (width // parts, (block, block))


@pytest.mark.parametrize(
    ("format", "width", "parts"), [(Format.BF16, 64, 3), (Format.MXFP4, 40, 8), (Format.NVFP4, 30, 6)]
)
def test_a_width_that_does_not_cut_into_whole_bytes_is_refused(format: Format, width: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"a width of {width} does not cut into {parts} equal {format.value} shards"):
        ExpertSpec(1, width, format).shard(parts)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (ExpertSpec(256, 2048, Format.MXFP4), "256x2048 mxfp4"),
        (ExpertSpec(1, 2048, Format.FP8_128x128, e8m0_scales=True), "1x2048 fp8_128x128 e8m0"),
        (ExpertSpec(8, 64, Format.FP8_128x128), "8x64 fp8_128x128 f32"),
        (ExpertSpec(8, 64, Format.BF16), "8x64 bf16"),
    ],
)
def test_a_spec_reads_well(spec: ExpertSpec, text: str) -> None:
    assert str(spec) == text


def layer(**changes: object) -> LayerSpec:
    facts = LayerSpec(
        "layers.3.ffn",
        hidden=HIDDEN,
        top_k=2,
        routed=ExpertSpec(7, 64, Format.MXFP4),
        shared=ExpertSpec(1, 128, Format.FP8_128x128),
        activation=Activation(10.0),
    )
    return replace(facts, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("top_k", [8, -2])
def test_top_k_must_not_exceed_the_routed_experts(top_k: int) -> None:
    with pytest.raises(ValueError, match=f"^layers.3.ffn: top-k {top_k} of 7 routed experts"):
        layer(top_k=top_k)


def test_a_layers_bytes_are_those_of_both_sets() -> None:
    spec = layer()
    assert spec.nbytes == 7 * spec.routed.nbytes(HIDDEN) + spec.shared.nbytes(HIDDEN)
    assert layer(shared=None).nbytes == 7 * spec.routed.nbytes(HIDDEN)


def test_a_rank_holds_its_experts_and_its_slice_of_every_width() -> None:
    local = layer().local(Placement(ep_size=3, ep_rank=0, tp_size=2, tp_rank=1))
    assert (local.routed.count, local.routed.width) == (3, 32)
    assert (local.shared.count, local.shared.width, local.shared.block) == (1, 64, (64, 64))
    assert local.top_k == 2
    assert layer(shared=None).local(Placement(ep_size=7, ep_rank=6)).top_k == 1
    assert layer().local(Placement()) == layer()


@given(st.integers(0, 300), st.integers(1, 20))
def test_ranks_share_the_experts_out_in_order_without_gap_or_overlap(experts: int, ranks: int) -> None:
    ranges = [Placement(ranks, rank).experts(experts) for rank in range(ranks)]
    assert [e for r in ranges for e in r] == list(range(experts))
    sizes = [len(r) for r in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"ep_size": 2, "ep_rank": 2}, "ep_rank 2 of ep_size 2"),
        ({"ep_size": 0}, "ep_rank 0 of ep_size 0"),
        ({"tp_size": 4, "tp_rank": -1}, "tp_rank -1 of tp_size 4"),
    ],
)
def test_places_that_do_not_exist_are_refused(facts: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(**facts)


@pytest.mark.parametrize("format", FP8_FORMATS)
def test_the_spec_of_weights_whose_gate_cuts_a_block_says_so(format: Format) -> None:
    spec = ExpertSpec.of(make_experts(format, 1, 40, HIDDEN))
    assert spec.block == ({128: 8, 32: 8, 1: 1}[format.block[0]], format.block[1])
