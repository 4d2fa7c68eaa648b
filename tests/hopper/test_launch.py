"""The launch's own source on a CPU (``plain_gluon.py``), over formats and tiles, against the reference."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="NOT CHECKED: the Hopper launch needs triton (pip install foldmoe[gpu])")

from foldmoe.backends.hopper import descriptors, heuristics, workspace
from foldmoe.backends.hopper.batch import BOTH, ROUTED, SHARED
from foldmoe.backends.hopper.packing import pack_layer
from foldmoe.moe import Activation
from foldmoe.reference import reference_moe, relative_error
from tests.hopper import oracle, plain_gluon
from tests.support.cases import random_case
from tests.triton.support import LIMIT, weights

EXPERTS, TOP_K = 4, 2

ALIKE = ("fp8-fp8", "fp8_e8m0-fp8_e8m0", "fp8_32-fp8_32", "bf16-bf16")
"""Pairs whose K loops are one where tiles and clamps are equal too."""


def launch(layer, case, config, sections=(BOTH,), others=()):
    """Float32 output: the oracle's prologue, the launch (``others`` as in ``plain_gluon``), the oracle's combine."""
    g, shared = layer.geometry, layer.shared_up is not None
    tokens = case.x.shape[0]
    cut_steps = config.routed_steps[0] if config.parts > 1 else 0
    sizes = workspace.Sizes(tokens, TOP_K, layer.experts, shared, g.hidden, g.h_stride, g.dtype, cut_steps)
    b = workspace.allocate(sizes, "cpu")
    for t in (b.xq, b.xs, b.h, b.hs, b.d, b.products):
        t.view(torch.uint8).fill_(255)
    whole = g.token_scales
    found = oracle.sort_routes(case.x, case.topk_ids, layer.experts, shared, tokens, (0, tokens), config.tokens, whole)
    oracle.fill(b, found, case.x, g.permuted, config.shared_tokens if shared else 0)
    for section in sections:
        plain_gluon.run(
            (
                *descriptors.descriptors(layer, b, config),
                layer.up.factors,
                layer.down.factors,
                b.xs,
                *(b.h, b.hs, b.d, b.control, b.products, torch.zeros(4, dtype=torch.int32)),
                section,
                *(b.capacity, b.row_capacity, g.k_up, g.k_down4, g.k_down8, config),
            ),
            others=others,
        )
    gates = case.topk_weights
    return oracle.combine(b.d, found.position, gates, None, 1.0, shared, *found.shared, tokens)


@pytest.mark.parametrize(
    ("pair", "hidden", "width", "shared_width", "size", "tail"),
    [
        ("mxfp4-fp8", 384, 192, 128, (8, 16, 4), 0),
        ("mxfp4-fp8_32", 256, 128, 192, (32, 32, 2), 16),
        ("mxfp4-fp8", 128, 64, 0, (16, 32, 2), 0),
        ("mxfp4-fp8", 256, 192, 64, (128, 64, 2), 64),
        ("fp8-fp8", 256, 192, 320, (8, 8, 4), 0),  # one loop
        ("fp8-fp8", 256, 192, 128, (128, 128, 2), 8),
        ("fp8-fp8", 384, 128, 64, (16, 16, 2), 8),  # one loop, tails
        ("fp8_e8m0-fp8_e8m0", 256, 320, 128, (8, 32, 4), 0),
        ("fp8_e8m0-fp8_e8m0", 128, 288, 64, (32, 16, 2), 16),
        ("fp8_32-fp8_32", 256, 96, 192, (16, 16, 4), 0),
        ("fp8_32-fp8", 256, 192, 128, (32, 32, 2), 0),
        ("fp8-fp8_32", 128, 192, 64, (8, 8, 2), 0),
        ("fp8-fp8", 384, 192, 0, (16, 8, 4), 0),
        ("fp8_32-fp8_32", 128, 64, 0, (32, 8, 2), 16),
        ("bf16-bf16", 256, 192, 320, (8, 8, 4), 0),  # one loop
        ("bf16-bf16", 384, 128, 64, (16, 16, 2), 8),  # one loop, tails
        ("bf16-bf16", 128, 96, 288, (16, 32, 2), 0),
        ("bf16-bf16", 256, 320, 0, (32, 8, 4), 16),
        ("bf16-bf16", 256, 192, 128, (128, 128, 2), 8),
    ],
)
def test_launch_matches_the_reference(pair, hidden, width, shared_width, size, tail):
    check(pair, hidden, width, shared_width, size, tail, "bf16" if pair == "bf16-bf16" else "fp8")


@pytest.mark.parametrize(("pair", "between"), [("mxfp4-fp8", 96), ("mxfp4-fp8", 0), ("fp8-fp8", 0)])
def test_wide_tiles_of_few_and_many_rows(pair, between):
    """Of 150 tokens, experts get 3, 70, 74 and 151 rows: every width of product, and a tile after another."""
    check(pair, 128, 64, 64, (128, 64, 2), 64, "fp8", tokens=150, between=between)


@pytest.mark.parametrize(
    ("pair", "size", "tail"),
    [
        ("mxfp4-fp8", (8, 8, 4), 0),
        ("mxfp4-fp8", (128, 64, 2), 8),
        ("fp8-fp8", (16, 16, 4), 0),
        ("fp8_32-fp8", (64, 32, 2), 32),
    ],
)
def test_one_scale_a_token(pair, size, tail):
    check(pair, 384, 192, 64, size, tail, "fp8_token")


@pytest.mark.parametrize("pair", ["mxfp4-fp8", "fp8-fp8", "bf16-bf16"])
def test_two_launches_give_the_bits_of_one(pair):
    same = Activation(LIMIT)
    precision = "bf16" if pair == "bf16-bf16" else "fp8"
    layer = pack_layer(*weights(pair, EXPERTS, 96, 192, 128), same, same, activations=precision)
    config = heuristics.build(layer.geometry, 16, 16, 2)
    case = random_case(21, TOP_K, EXPERTS, 128)
    assert torch.equal(launch(layer, case, config), launch(layer, case, config, (ROUTED, SHARED)))


@pytest.mark.parametrize("sections", [(BOTH,), (ROUTED, SHARED)], ids=["folded", "two launches"])
@pytest.mark.parametrize(
    ("tokens", "hidden", "shared_width"),
    [(1, 1152, 128), (3, 2048, 320), (8, 384, 64), (5, 128, 64), (2, 640, 0), (12, 384, 64), (30, 256, 64)],
)
def test_a_cut_k_gives_the_bits_of_a_whole_one(tokens, hidden, shared_width, sections):
    """Odd numbers of K steps, one step, more steps than are added at once; rows and pairs of tokens left empty; two
    shared token tiles (12), and more tiles than are cut (30)."""
    same = Activation(LIMIT)
    routed, shared = weights("mxfp4-fp8_e8m0", EXPERTS, 192, shared_width or 32, hidden)
    layer = pack_layer(routed, shared if shared_width else None, same, same)
    case = random_case(tokens, TOP_K, EXPERTS, hidden)
    case.topk_ids[1:3] = -1
    config = heuristics.build(layer.geometry, 8, 8, 4, parts=heuristics.PARTS)
    cut = launch(layer, case, config, sections if shared_width else sections[:1])
    assert torch.equal(cut, launch(layer, case, replace(config, parts=1)))


@pytest.mark.parametrize("pair", ["fp8-fp8", "fp8_32-fp8_32", "bf16-bf16"])
def test_bits_do_not_depend_on_tiles(pair):
    same = Activation(LIMIT)
    precision = "bf16" if pair == "bf16-bf16" else "fp8"
    layer = pack_layer(*weights(pair, EXPERTS, 192, 128, 256), same, same, activations=precision)
    case = random_case(21, TOP_K, EXPERTS, 256)
    sizes = [(8, 8, 4), (16, 32, 4), (64, 16, 2)] + ([(128, 128, 2)] if "32" not in pair else [])
    first, *others = (launch(layer, case, heuristics.build(layer.geometry, *size)) for size in sizes)
    assert all(torch.equal(first, other) for other in others)


def check(pair, hidden, width, shared_width, size, tail, precision, tokens=21, between=0):
    routed, shared = weights(pair, EXPERTS, width, shared_width or 32, hidden)
    shared = shared if shared_width else None
    clamps = Activation(LIMIT), Activation(LIMIT if size[0] == size[1] else None)
    layer = pack_layer(routed, shared, *clamps, activations=precision)
    config = replace(heuristics.build(layer.geometry, *size, between=between), tail=tail)
    assert config.one_loop == (bool(shared) and pair in ALIKE and size[0] == size[1])
    case = random_case(tokens, TOP_K, EXPERTS, hidden)
    case.topk_ids[5:][case.topk_ids[5:] == 3] = 1  # a few rows on one expert, many and repeated ones on another
    case.topk_ids[2] = -1
    y = launch(layer, case, config)
    want = reference_moe(
        *case.args, routed, shared, activation=clamps[0], shared_activation=clamps[1], activations=precision
    )
    # bf16: hidden vectors are rounded. fp8_token: theirs have scales of 128 columns, the reference's one each.
    assert relative_error(y, want) < {"fp8": 1e-3, "bf16": 2e-3, "fp8_token": 5e-3}[precision]
