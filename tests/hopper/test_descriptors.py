"""What TMA asks of its descriptors, for every kind of shape: it reports a breach only by an illegal instruction."""

from math import inf

import pytest
import torch

pytest.importorskip("triton", reason="NOT CHECKED: TMA descriptors need triton (pip install foldmoe[gpu])")
from foldmoe.backends.hopper import batch, descriptors, heuristics, pack, pack_shared, workspace

SIZES = [(8, 8, 4), (8, 32, 4), (16, 32, 4), (32, 32, 2), (64, 128, 2), (128, 128, 2)]


def weights(hidden, width, shared_width, block):
    packed = []
    for rows, columns, up in ((2 * width, hidden, True), (hidden, width, False)):
        codes = torch.zeros(2, rows, columns // 2, dtype=torch.uint8)
        packed.append(pack.pack_mxfp4(codes, torch.full((2, rows, columns // 32), 120, dtype=torch.uint8), up))
    shared = [None, None]
    if shared_width:
        for i, (rows, columns) in enumerate(((2 * shared_width, hidden), (hidden, shared_width))):
            values = torch.zeros(rows, columns).to(torch.float8_e4m3fn)
            scales = torch.ones(-(-rows // block), -(-columns // block))
            shared[i] = pack_shared.pack_fp8_block(values, scales, i == 0, block=(block, block))
    geometry = heuristics.Geometry(
        hidden,
        packed[0].blocks,
        packed[1].blocks,
        shared[0].blocks if shared_width else 0,
        shared[1].blocks if shared_width else 0,
        packed[1].steps,
        shared[1].steps if shared_width else 0,
        (1 if block == 128 else 4) if shared_width else 0,
        inf,
        inf,
    )
    return batch.Weights(packed[0], packed[1], shared[0], shared[1], geometry, torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize(
    ("width", "shared_width", "block"), [(320, 192, 64), (96, 0, 128), (64, 576, 32), (384, 128, 128)]
)
@pytest.mark.parametrize("hidden", [128, 384, 512])
def test_descriptors(hidden, width, shared_width, block):
    layer = weights(hidden, width, shared_width, block)
    g = layer.geometry
    for tokens, top_k in ((1, 1), (7, 3), (130, 2)):
        rows = workspace.sorted_rows(tokens, top_k, layer.experts, bool(shared_width))
        b = workspace.allocate(tokens, top_k, layer.experts, bool(shared_width), hidden, g.h_stride, "cpu")
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
