"""What TMA asks of its descriptors, for every kind of shape: it reports a breach only by an illegal instruction."""

import pytest
import torch

pytest.importorskip("triton", reason="NOT CHECKED: TMA descriptors need triton (pip install foldmoe[gpu])")
from foldmoe.backends.hopper import batch, descriptors, heuristics, pack, pack_bf16, pack_fp8, workspace
from foldmoe.backends.hopper.packing import geometry
from foldmoe.moe import Activation

SIZES = [(8, 8, 4), (8, 32, 4), (16, 32, 4), (32, 32, 2), (64, 128, 2), (128, 128, 2)]


def weights(hidden, width, shared_width, block, routed):
    def fp8(experts, rows, columns, up):
        values = torch.zeros(experts, rows, columns).to(torch.float8_e4m3fn)
        scales = torch.ones(experts, -(-rows // block), -(-columns // block))
        return pack_fp8.pack_fp8_block(values, scales, up, block=(block, block))

    def mxfp4(experts, rows, columns, up):
        codes = torch.zeros(experts, rows, columns // 2, dtype=torch.uint8)
        return pack.pack_mxfp4(codes, torch.full((experts, rows, columns // 32), 120, dtype=torch.uint8), up)

    def bf16(experts, rows, columns, up):
        return pack_bf16.pack_bf16(torch.zeros(experts, rows, columns, dtype=torch.bfloat16), up)

    def both(kind, experts, width):
        return kind(experts, 2 * width, hidden, True), kind(experts, hidden, width, False)

    packed = both({"mxfp4": mxfp4, "fp8": fp8, "bf16": bf16}[routed], 2, width)
    shared = both(bf16 if routed == "bf16" else fp8, 1, shared_width) if shared_width else (None, None)
    sizes = geometry(*packed, *shared, Activation(), Activation(), "bf16" if routed == "bf16" else "fp8")
    assert sizes.routed == routed
    return batch.Weights(*packed, *shared, sizes, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("routed", ["mxfp4", "fp8", "bf16"])
@pytest.mark.parametrize(
    ("width", "shared_width", "block"), [(320, 192, 64), (96, 0, 32), (64, 576, 32), (384, 128, 128)]
)
@pytest.mark.parametrize("hidden", [128, 384, 512])
def test_descriptors(hidden, width, shared_width, block, routed):
    layer = weights(hidden, width, shared_width, block, routed)
    g = layer.geometry
    for tokens, top_k in ((1, 1), (7, 3), (130, 2)):
        rows = workspace.sorted_rows(tokens, top_k, layer.experts, bool(shared_width))
        sizes = workspace.Sizes(tokens, top_k, layer.experts, bool(shared_width), hidden, g.h_stride, g.dtype)
        b = workspace.allocate(sizes, "cpu")
        assert b.row_capacity % 4 == 0
        assert b.row_capacity >= rows
        for size in SIZES:
            for d in descriptors.descriptors(layer, b, heuristics.build(g, *size)):
                item = d.base.element_size()
                assert d.base.data_ptr() % 16 == 0
                assert d.strides[-1] == 1
                assert all(s * item % 16 == 0 for s in d.strides[:-1])
                assert all(0 < n < 2**32 for n in d.shape)
                assert all(0 < n <= 256 for n in d.block_shape)
                assert d.block_shape[-1] * item % 16 == 0
                assert d.layout.swizzle_byte_width in (0, d.block_shape[-1] * item)
                # nothing that the shape allows lies outside the tensor
                assert sum((n - 1) * s for n, s in zip(d.shape, d.strides, strict=True)) < d.base.numel()


def test_a_batch_never_outgrows_its_rows():
    g = torch.Generator().manual_seed(0)
    for _ in range(200):
        tokens, top_k, experts = (int(torch.randint(1, n, (1,), generator=g)) for n in (40, 8, 70))
        ids = torch.randint(-1, experts, (tokens, top_k), generator=g).flatten()
        counts = torch.bincount(ids[ids >= 0], minlength=experts)
        for shared in (False, True):
            used = (-(-tokens // 4) * 4 if shared else 0) + int(((counts + 3) // 4 * 4).sum())
            assert used <= workspace.sorted_rows(tokens, top_k, experts, shared)


def test_weights_off_a_16_byte_boundary_are_not_packed_in_place():
    codes, scales = (
        torch.zeros(2 * 256 * 64 + 1, dtype=torch.uint8),
        torch.full((2 * 256 * 4 + 1,), 120, dtype=torch.uint8),
    )
    packed = pack.pack_mxfp4(codes[1:].view(2, 256, 64), scales[1:].view(2, 256, 4), False, consume=True)
    assert packed.codes.data_ptr() % 16 == 0
    assert packed.offsets.data_ptr() % 16 == 0
