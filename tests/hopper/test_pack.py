"""Packed layouts: exact both ways, and decoded as the kernel's threads do."""

import pytest
import torch

from foldmoe.backends.hopper import pack, pack_bf16, pack_fp8
from tests.hopper import emulate

SHAPES = [
    (1, 256, 128, True),
    (2, 512, 256, False),
    (3, 192, 128, True),
    (2, 384, 96, False),
    (1, 576, 256, True),
    (1, 128, 320, False),
    (5, 128, 96, True),
]


def routed(experts, rows, columns, seed=0, span=11):
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, generator=g)
    top = torch.randint(100, 130, (experts, rows, 1), generator=g)
    scales = (top - torch.randint(0, span + 1, (experts, rows, columns // 32), generator=g)).to(torch.uint8)
    return codes, scales


@pytest.fixture(params=[100, 2, 1], ids=["one by one", "two parts", "all at once"], autouse=True)
def _parts(request, monkeypatch):
    """How many experts are packed at a time; by itself it is more than one from 200 experts on."""
    monkeypatch.setattr(pack, "_PARTS", request.param)


@pytest.mark.parametrize(("experts", "rows", "columns", "interleave"), SHAPES)
@pytest.mark.parametrize("consume", [False, True])
def test_mxfp4_round_trip(experts, rows, columns, interleave, consume):
    codes, scales = routed(experts, rows, columns)
    packed = pack.pack_mxfp4(codes.clone(), scales.clone(), interleave, consume=consume)
    back = pack.unpack_mxfp4(packed)
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], scales)


def test_experts_cut_out_of_wider_ones():
    codes, scales = routed(3, 512, 128)
    packed = pack.pack_mxfp4(codes[:, :256], scales[:, :256], True)
    assert torch.equal(pack.unpack_mxfp4(packed)[0], codes[:, :256])


def test_consume_packs_in_place():
    codes, scales = routed(2, 512, 256)
    packed = pack.pack_mxfp4(codes, scales, True, consume=True)
    assert packed.codes.data_ptr() == codes.data_ptr()
    assert packed.offsets.data_ptr() == scales.data_ptr()
    assert packed.nbytes == codes.nbytes + scales.nbytes + 2 * 512 * 4


def test_scale_bytes_of_zero_groups_survive():
    codes, scales = routed(5, 256, 256)
    codes.view(5, 256, 8, 16)[:, ::3, 2] &= 0x88  # signed zeros
    scales[:, ::3, 2] = torch.tensor([0, 254], dtype=torch.uint8)[torch.arange(86) % 2]
    codes[3, 5] = 0
    scales[3, 5] = torch.arange(8, dtype=torch.uint8) * 30
    scales[3, 5, 3] = 255
    back = pack.unpack_mxfp4(pack.pack_mxfp4(codes, scales, True))
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1], scales)


@pytest.mark.parametrize(("byte", "message"), [(255, "NaN"), (20, "span"), (240, "span")])
def test_refuses_what_it_cannot_express(byte, message):
    codes, scales = routed(3, 256, 128)
    codes |= 1
    scales[1, 7, 1] = byte
    with pytest.raises(ValueError, match=rf"layers\.3\.w2, expert 1: .*{message}"):
        pack.pack_mxfp4(codes, scales, False, name="layers.3.w2")


def test_counts_the_rows_it_refuses():
    codes, scales = routed(1, 256, 128, span=0)
    codes |= 1
    scales[0, 10:14, 0] -= 12
    with pytest.raises(ValueError, match="4 of 256 rows"):
        pack.pack_mxfp4(codes, scales, False)


@pytest.mark.parametrize(("experts", "rows", "columns", "interleave"), SHAPES)
def test_threads_decode_exactly(experts, rows, columns, interleave):
    """Every thread's registers, as the kernel upcasts them, against the plain float64 meaning of the stored bytes."""
    codes, scales = routed(experts, rows, columns, seed=1)
    packed = pack.pack_mxfp4(codes, scales, interleave)
    dense = emulate.dequantise_mxfp4(codes, scales)
    order = pack.row_order(rows, interleave, permuted=True)
    for e in range(experts):
        decoded = emulate.decode_units(packed, e)
        want = torch.zeros(packed.blocks * 256, packed.steps * 128, dtype=torch.float64)
        want[order < rows, :columns] = dense[e][order[order < rows]]
        assert torch.equal(decoded, want)


def fp8_stack(experts, rows, columns, block):
    g = torch.Generator().manual_seed(2)
    values = torch.randn(experts, rows, columns, generator=g).to(torch.float8_e4m3fn)
    return values, torch.rand(experts, -(-rows // block[0]), -(-columns // block[1]), generator=g) + 0.1


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (64, 64), (64, 32), (128, 32), (32, 128)])
@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(
    ("experts", "rows", "columns", "consume"),
    [(1, 256, 128, False), (3, 512, 384, True), (2, 384, 320, False), (2, 384, 320, True)],
)
def test_fp8_round_trip(block, interleave, experts, rows, columns, consume):
    if interleave and rows // 2 % block[0]:
        pytest.skip("the gate/up boundary would cut a scale block")
    values, scales = fp8_stack(experts, rows, columns, block)
    packed = pack_fp8.pack_fp8_block(values.clone(), scales.clone(), interleave, block=block, consume=consume)
    back = pack_fp8.unpack_fp8_block(packed)
    assert torch.equal(back[0].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(back[1], scales)
    wide = scales.double().repeat_interleave(block[0], 1)[:, :rows].repeat_interleave(block[1], 2)[:, :, :columns]
    dense = values.double() * wide
    order = pack.row_order(rows, interleave)
    for e in range(experts):
        want = torch.zeros(packed.blocks * 256, packed.steps * 128, dtype=torch.float64)
        want[order < rows, :columns] = dense[e][order[order < rows]]
        assert torch.equal(emulate.decode_fp8(packed, e), want)


def test_consume_packs_fp8_in_place_where_sizes_allow():
    values, scales = fp8_stack(2, 512, 256, (128, 128))
    packed = pack_fp8.pack_fp8_block(values, scales, True, block=(128, 128), consume=True)
    assert packed.values.data_ptr() == values.data_ptr()
    assert packed.nbytes == values.nbytes + packed.scales.nbytes + scales.nbytes
    for given in (fp8_stack(2, 384, 256, (64, 64))[0], torch.empty(512 * 256 + 1, dtype=torch.float8_e4m3fn)[1:]):
        given = given.view(-1, given.shape[-2] if given.ndim > 1 else 512, 256)
        scales = torch.ones(given.shape[0], given.shape[1] // 64, 4)
        packed = pack_fp8.pack_fp8_block(given, scales, True, block=(64, 64), consume=True)
        assert packed.values.data_ptr() != given.data_ptr()
        assert packed.values.data_ptr() % 16 == 0


def test_fp8_refuses():
    values = torch.zeros(1, 256, 128).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="1x32"):
        pack_fp8.pack_fp8_block(values, torch.ones(1, 256, 4), False, block=(1, 32))
    with pytest.raises(ValueError, match="scale lies outside"):
        pack_fp8.pack_fp8_block(values, torch.full((1, 2, 1), 2.0**-126), False, block=(128, 128))


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize(
    ("experts", "rows", "columns", "consume"), [(1, 256, 128, False), (3, 512, 384, True), (2, 384, 96, True)]
)
def test_bf16_round_trip(interleave, experts, rows, columns, consume):
    values = torch.randn(experts, rows, columns, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    given = values.clone()
    packed = pack_bf16.pack_bf16(given, interleave, consume=consume)
    assert torch.equal(pack_bf16.unpack_bf16(packed), values)
    exact = rows % 256 == 0 and columns % 128 == 0
    assert (packed.values.data_ptr() == given.data_ptr()) == (consume and exact)
    order = pack.row_order(rows, interleave)
    units = packed.values.view(experts, packed.blocks, packed.steps, 256, 64).transpose(2, 3).flatten(3).flatten(1, 2)
    for e in range(experts):
        want = torch.zeros(packed.blocks * 256, packed.steps * 64, dtype=torch.bfloat16)
        want[order < rows, :columns] = values[e][order[order < rows]]
        assert torch.equal(units[e], want)


def test_other_floats_are_no_bf16():
    with pytest.raises(ValueError, match="w2: values in float16; the launch multiplies bfloat16"):
        pack_bf16.pack_bf16(torch.zeros(1, 256, 128, dtype=torch.float16), False, name="w2")
