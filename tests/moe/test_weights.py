from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import ExpertWeights
from tests.support.cases import ODD_WIDTHS, make_experts, quantize
from tests.support.strategies import QUANTIZED_FORMATS

EXPERTS, HIDDEN = 2, 96


def dense(experts: ExpertWeights) -> tuple[Tensor, Tensor, Tensor]:
    gate, up = experts.gate_up.dequantize(torch.float64).chunk(2, dim=-2)
    return gate, up, experts.down.dequantize(torch.float64)


def parts(format: Format, width: int) -> tuple[QuantizedTensor, QuantizedTensor, QuantizedTensor]:
    shapes = ((EXPERTS, width, HIDDEN), (EXPERTS, width, HIDDEN), (EXPERTS, HIDDEN, width))
    gate, up, down = (quantize(torch.randn(s) * f, format) for s, f in zip(shapes, (1.0, 30.0, 1.0), strict=True))
    return gate, up, down


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_from_parts_keeps_every_number_gate_first(format: Format, width: int) -> None:
    matrices = parts(format, width)
    experts = ExpertWeights.from_parts(*matrices)
    assert (experts.num_experts, experts.width, experts.hidden, experts.format) == (EXPERTS, width, HIDDEN, format)
    for found, stored in zip(dense(experts), matrices, strict=True):
        assert torch.equal(found, stored.dequantize(torch.float64))


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_gate_and_up_are_the_two_halves_as_views(format: Format, width: int) -> None:
    experts = ExpertWeights.from_parts(*parts(format, width))
    for half, expected in zip(experts.gate_and_up(), dense(experts), strict=False):
        assert torch.equal(half.dequantize(torch.float64), expected)
        assert half.values.untyped_storage().data_ptr() == experts.gate_up.values.untyped_storage().data_ptr()


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_a_stack_in_either_order_gives_the_same_experts(format: Format, width: int) -> None:
    stacked, down = quantize(torch.randn(EXPERTS, 2 * width, HIDDEN), format), parts(format, width)[2]
    first, second = stacked.dequantize(torch.float64).chunk(2, dim=-2)
    gate, up, _ = dense(ExpertWeights.from_stacked(stacked, down, order="gate_up"))
    assert torch.equal(gate, first)
    assert torch.equal(up, second)
    gate, up, _ = dense(ExpertWeights.from_stacked(stacked, down, order="up_gate"))
    assert torch.equal(gate, second)
    assert torch.equal(up, first)


def test_an_unknown_order_is_refused() -> None:
    experts = make_experts(Format.BF16, 1, 32, HIDDEN)
    with pytest.raises(ValueError, match="must be 'gate_up' or 'up_gate', found 'w3w1'"):
        ExpertWeights.from_stacked(experts.gate_up, experts.down, order="w3w1")  # type: ignore[arg-type]


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize(
    ("width", "size"), [(40, 2), (64, 2), (192, 3), (288, 9), (320, 2), (576, 2), (384, 2), (40, 1)]
)
def test_shards_are_slices_of_the_dequantised_matrices(format: Format, width: int, size: int) -> None:
    experts = make_experts(format, EXPERTS, width, HIDDEN)
    gate, up, down = dense(experts)
    part = width // size
    for rank in range(size):
        shard = experts.shard(rank, size)
        mine = slice(rank * part, (rank + 1) * part)
        for found, expected in zip(dense(shard), (gate[:, mine], up[:, mine], down[:, :, mine]), strict=True):
            assert torch.equal(found, expected)


def test_a_block_of_128_cut_at_192_becomes_64() -> None:
    shard = make_experts(Format.FP8_128x128, 1, 384, 128).shard(1, 2)
    assert (shard.gate_up.block, shard.down.block) == ((64, 128), (128, 64))


def test_one_shard_of_one_is_the_set_itself() -> None:
    experts = make_experts(Format.MXFP4, 1, 64, HIDDEN)
    assert experts.shard(0, 1) is experts


@pytest.mark.parametrize(("format", "width", "size"), [(Format.BF16, 40, 3), (Format.MXFP4, 40, 8)])
def test_a_width_that_does_not_cut_into_whole_bytes_is_refused(format: Format, width: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"a width of {width} does not cut into {size} equal {format.value} shards"):
        make_experts(format, 1, width, HIDDEN).shard(0, size)


@pytest.mark.parametrize("rank", [2, -1])
def test_a_rank_that_does_not_exist_has_no_shard(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of 2"):
        make_experts(Format.BF16, 1, 64, HIDDEN).shard(rank, 2)


@pytest.mark.parametrize("format", QUANTIZED_FORMATS)
def test_a_range_of_experts_is_a_view(format: Format) -> None:
    experts = make_experts(format, 5, 64, HIDDEN)
    some = experts[1:3]
    assert some.num_experts == 2
    for found, whole in zip(dense(some), dense(experts), strict=True):
        assert torch.equal(found, whole[1:3])
    assert some.down.values.data_ptr() == experts.down.values[1].data_ptr()


def test_nbytes_and_device_follow_the_tensors() -> None:
    experts = make_experts(Format.MXFP4, 3, 64, HIDDEN)
    assert experts.nbytes == experts.gate_up.nbytes + experts.down.nbytes
    assert experts.device.type == "cpu"
    assert experts.to("meta").device.type == "meta"


def plain(*shape: int) -> QuantizedTensor:
    return QuantizedTensor(torch.zeros(shape), format=Format.BF16)


@pytest.mark.parametrize(
    ("gate_up", "down"),
    [
        ((2, 64, 16), (3, 16, 32)),
        ((2, 64, 16), (2, 16, 64)),
        ((2, 64, 16), (2, 8, 32)),
        ((64, 16), (16, 32)),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(gate_up: tuple[int, ...], down: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"do not belong together; expected \[E, 2I, H\] and \[E, H, I\]"):
        ExpertWeights(plain(*gate_up), plain(*down))


def test_one_set_has_one_format() -> None:
    mixed = [make_experts(f, 1, 64, HIDDEN) for f in (Format.MXFP4, Format.MXFP8)]
    for one, other in pairwise([*mixed, mixed[0]]):
        with pytest.raises(ValueError, match=f"gate_up is {one.format.value} but down is {other.format.value}"):
            ExpertWeights(one.gate_up, other.down)


def test_a_scale_block_over_the_gate_up_boundary_is_refused() -> None:
    gate_up, down = (quantize(torch.randn(1, *s), Format.FP8_128x128) for s in ((384, HIDDEN), (HIDDEN, 192)))
    with pytest.raises(ValueError, match="boundary at row 192 cuts a 128-row scale block"):
        ExpertWeights(gate_up, down)


def test_gate_and_up_of_different_storage_are_refused() -> None:
    gate, up, down = parts(Format.FP8_128x128, 128)
    one_byte = quantize(torch.randn(EXPERTS, 128, HIDDEN), Format.FP8_128x128, e8m0_scales=True)
    with pytest.raises(ValueError, match="different scales"):
        ExpertWeights.from_parts(gate, one_byte, down)
    with pytest.raises(ValueError, match="different shape"):
        ExpertWeights.from_parts(gate, replace(up, values=up.values[:, :64], scales=up.scales[:, :1]), down)


@pytest.mark.parametrize("format", Format)
@pytest.mark.parametrize("width", ODD_WIDTHS)
def test_unpadding_gives_back_the_stored_bytes(format: Format, width: int) -> None:
    experts = make_experts(format, EXPERTS, width, HIDDEN)
    back = experts.padded(-(-(width + 1) // 128) * 128).unpadded(width)
    for stored, found in ((experts.gate_up, back.gate_up), (experts.down, back.down)):
        assert (stored.block, stored.shape) == (found.block, found.shape)
        for role, original in stored.tensors().items():
            assert torch.equal(original.view(torch.uint8), found.tensors()[role].view(torch.uint8))


def test_experts_are_not_unpadded_to_more_than_their_width() -> None:
    with pytest.raises(ValueError, match="experts of width 64 were never padded from 96"):
        make_experts(Format.BF16, 1, 64, HIDDEN).unpadded(96)
