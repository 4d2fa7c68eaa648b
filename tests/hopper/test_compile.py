"""Every config that the heuristics choose compiles for sm_90, no register spilled, its products overlapped."""

from dataclasses import replace
from math import inf

import pytest

from foldmoe.backends.hopper import heuristics

pytest.importorskip("triton", reason="NOT CHECKED: compiling the Hopper launch needs triton (pip install foldmoe[gpu])")
from tests.hopper import offline

TOKEN = heuristics.Geometry(4096, 16, 16, 16, 16, 16, 16, 1, 10.0, 10.0, token_scales=True)
FLASH = heuristics.Geometry(4096, 16, 16, 16, 16, 16, 16, 1, 10.0, 10.0)
NARROW = replace(FLASH, up4=2, up8=2, k_down4=2, k_down8=2)
"""One of eight ranks that share the width of V4-Flash's experts."""

V41 = heuristics.Geometry(5120, 18, 20, 18, 20, 18, 18, 4, 10.0, 10.0)
ALONE = heuristics.Geometry(512, 3, 2, 0, 0, 3, 0, 0, inf, inf)
V3 = heuristics.Geometry(7168, 16, 28, 16, 28, 16, 16, 1, inf, inf, routed="fp8", routed_groups=1)
FINE = heuristics.Geometry(5120, 18, 20, 18, 20, 18, 18, 4, inf, inf, routed="fp8", routed_groups=4)
BF16 = heuristics.Geometry(4096, 11, 16, 11, 16, 22, 22, 0, inf, inf, routed="bf16")
FP8_ALONE = heuristics.Geometry(512, 3, 2, 0, 0, 3, 0, 0, inf, inf, routed="fp8", routed_groups=1)
PRO = heuristics.Geometry(7168, 24, 28, 24, 28, 24, 24, 1, 10.0, 10.0)
CLAMPED = [replace(geometry, limit4=10.0, limit8=10.0) for geometry in (V3, FINE, FP8_ALONE)]
MIXED = [
    replace(V3, limit4=10.0),
    replace(V3, limit8=10.0),
    replace(V3, scale_groups=4),
    replace(V3, routed_groups=4),
    replace(V3, scale_groups=4, limit4=10.0, limit8=10.0),
    replace(V3, routed_groups=4, limit4=10.0, limit8=10.0),
]
"""FP8 sets whose clamps or scales differ: one K loop each."""


def every(geometry):
    """The configs chosen over all sizes of batch."""
    found = {}
    for experts in (8, 32, 256):
        for exponent in range(16):
            for rows in (2**exponent, 3 * 2**exponent // 2):
                config = heuristics.choose(geometry, rows, 6, experts, powers=True)
                sizes = config.tokens, config.between, config.shared_tokens, config.warpgroups, config.parts
                found[sizes] = config
    return list(found.values())


def name(config):
    g = config.geometry
    scales = "-token" if g.token_scales else ""
    tokens = f"{config.tokens}+{config.between}" if config.between else config.tokens
    clamps = f"-{g.limit4:.0f}-{g.limit8:.0f}" if g.whole else ""
    groups = f"-{g.routed_groups}-{g.scale_groups}" if g.whole else ""
    parts = f"-{config.parts} parts" if config.parts > 1 else ""
    return f"{g.routed}{scales}-{g.hidden}{clamps}{groups}-{tokens}-{config.shared_tokens}-{config.warpgroups}{parts}"


def check(config):
    """What was found, all of it as it must be."""
    found = offline.report(offline.compile_config(config))
    g = config.geometry
    assert found.shared <= 232448
    assert not found.warnings, "ptxas serialised wgmma or ignored setmaxnreg"
    assert found.spilled == 0, found
    assert not found.at_barriers, "memory of an mbarrier that nobody waits at was given to something else"
    if g.quantised and not g.token_scales:
        assert found.fenced == found.loops, "a slot is given back while its scales may still be read"
    if g.token_scales:
        assert found.waits * 4 < found.products, found
    elif g.quantised:
        assert found.waits * 4 == found.products or 4 in (g.scale_groups, g.routed_groups), found
    else:
        assert found.waits * 4 * config.units == found.products, found  # a unit's step is four products
    if g.routed != "mxfp4":
        assert found.loops == config.warpgroups * (1 + bool(config.tail) + config.two_loops), found
    else:
        widths = 1 + bool(config.tail) + bool(config.between)
        assert found.loops >= config.warpgroups * (widths + config.two_loops), found
    return found


@pytest.mark.parametrize(
    ("geometry", "size"),
    [
        (FLASH, (8, 8, 4)),
        (NARROW, (8, 8, 4, 0, heuristics.PARTS)),
        (V3, (8, 8, 4)),
        (BF16, (8, 8, 4)),
        (CLAMPED[0], (128, 128, 2)),
        pytest.param(ALONE, (32, 32, 2), marks=pytest.mark.slow),
        pytest.param(FP8_ALONE, (16, 8, 4), marks=pytest.mark.slow),
    ],
    ids=["flash", "narrow, cut", "v3", "bf16", "v3 clamped", "routed alone", "fp8 alone"],
)
def test_compiles(geometry, size):
    check(heuristics.build(geometry, *size))


def test_products_of_one_step_stay_loops():
    """With one K step known when it compiled, ptxas 12.8 left out a descriptor of the second of two products that it
    merged: wrong numbers at H 128 and I 64. Run-time step counts keep them apart."""
    one = heuristics.Geometry(128, 1, 1, 1, 1, 1, 1, 1, inf, inf)
    assert offline.report(offline.compile_config(heuristics.build(one, 8, 32, 4))).loops == 2 * 4


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "config",
    [c for g in (FLASH, NARROW, TOKEN, V41, PRO, V3, FINE, BF16, *CLAMPED) for c in every(g)],
    ids=name,
)
def test_every_choice_compiles(config):
    check(config)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("config", [c for g in MIXED for c in every(g)], ids=name)
def test_every_choice_compiles_where_sets_differ(config):
    check(config)


@pytest.mark.parametrize(
    "geometry", [FLASH, V41, ALONE, V3, FINE, BF16], ids=["flash", "v4.1", "routed alone", "v3", "fine fp8", "bf16"]
)
def test_ring_fits(geometry):
    for config in every(geometry):
        assert config.stages >= 4, config


def test_tiles_with_four_scales_a_step_are_narrow():
    assert max(config.shared_tokens for config in every(V41)) == 64
    assert max(config.tokens for config in every(FINE)) == 64


def test_many_tokens_with_few_routes_an_expert_take_wide_shared_tiles():
    """One of eight ranks of V4-Flash: 512 tokens are 12 rows an expert, and 512 of the shared expert."""
    rank = [heuristics.choose(FLASH, rows, 6 / 8, 32) for rows in (32, 128, 512)]
    assert [(c.tokens, c.shared_tokens, c.warpgroups) for c in rank] == [(8, 32, 4), (8, 64, 4), (16, 128, 2)]


@pytest.mark.parametrize(
    ("geometry", "rows", "routes", "experts", "cut"),
    [
        (NARROW, 1, 6, 256, True),  # 14 tiles
        (NARROW, 2, 6, 256, False),  # 26
        (FLASH, 1, 6, 256, False),  # 112
        (FLASH, 1, 6 / 8, 32, False),  # an expert-parallel rank: 28 on average
        (replace(FLASH, up4=1, up8=1), 2, 6, 256, True),  # one of sixteen ranks: 13
        (NARROW, 9, 1 / 8, 32, False),  # wider shared tiles
        (replace(TOKEN, up4=2, up8=2), 1, 6, 256, False),
        (replace(V41, up4=2, up8=2), 1, 6, 256, False),
        (replace(V3, up4=2, up8=2), 1, 6, 256, False),
    ],
)
def test_k_is_cut_where_up_tiles_are_few(geometry, rows, routes, experts, cut):
    assert (heuristics.choose(geometry, rows, routes, experts, powers=True).parts > 1) == cut
    assert heuristics.choose(geometry, rows, routes, experts).parts == 1  # float32 scales


def test_a_third_width_where_experts_have_few_more_rows_than_half_a_tile():
    widths = [heuristics.choose(FLASH, rows, 6, 256).between for rows in (2048, 3072, 4096, 8192)]
    assert widths == [0, 96, 96, 0]


def test_fp8_sets_share_a_loop_where_tiles_allow():
    assert all(c.one_loop == (c.tokens == c.shared_tokens) for c in every(V3))
    assert all(c.one_loop for c in every(V3) if c.tokens >= 64)
    assert any(c.one_loop for c in every(V3) if c.tokens == 8)
    assert not any(c.one_loop for c in every(replace(V3, limit8=10.0)))
