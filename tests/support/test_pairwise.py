"""The sets of calls that both GPU backends' tests run: every pair is in them, none is for show, and they stay small."""

from __future__ import annotations

from collections import defaultdict
from itertools import combinations, product
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("triton", reason="NOT CHECKED: both backends need triton (pip install foldmoe[gpu])")

from foldmoe.backends import get
from foldmoe.moe import Activation, ExpertSpec, LayerSpec
from tests.hopper import gpu_layers as hopper
from tests.support.cases import CASE_NAMES, TINY, Case, get_case
from tests.support.pairwise import LEAST_TOKENS, OTHERS, TOKENS, WIDTHS, cover
from tests.triton import gpu_layers as triton
from tests.triton.support import HOPPER_PAIRS, LIMIT, PAIRS

if TYPE_CHECKING:
    from foldmoe.moe.spec import ActivationPrecision

SETS = {"hopper": hopper.pairwise(), "triton": triton.pairwise()}
BACKENDS = pytest.mark.parametrize("backend", SETS)


@BACKENDS
def test_every_two_values_meet(backend: str) -> None:
    met = set()
    for layer, tokens, routing in SETS[backend]:
        values = [*layer.traits, ("tokens", tokens), ("routing", routing)]
        met |= {frozenset(two) for two in combinations(values, 2)}
    factors = defaultdict(set)
    for layer, _, _ in SETS[backend]:
        for factor, value in layer.traits:
            factors[factor].add(value)
    assert factors["width"] == set(WIDTHS)
    factors |= {"tokens": set(TOKENS), "routing": set(LEAST_TOKENS)}
    missing = [
        (a, b)
        for one, other in combinations(factors, 2)
        for a, b in product([(one, v) for v in factors[one]], [(other, v) for v in factors[other]])
        if frozenset({a, b}) not in met
        and not (
            {one, other} == {"tokens", "routing"} and dict((a, b))["tokens"] < LEAST_TOKENS[dict((a, b))["routing"]]
        )
    ]
    assert not missing


@BACKENDS
def test_formats_and_both_roles_of_a_width_are_in_the_set(backend: str) -> None:
    layers = {layer for layer, _, _ in SETS[backend]}
    assert {layer.pair for layer in layers} == (
        set(PAIRS) if backend == "triton" else {pair for pair in HOPPER_PAIRS if _supported(backend, pair, 64, 64)}
    )
    widths = [_widths(layer) for layer in layers]
    assert {routed for routed, _ in widths} == set(WIDTHS)
    assert {shared for _, shared in widths} - {0} == set(WIDTHS)
    assert all(_supported(backend, layer.pair, *_widths(layer), layer.activations) for layer in layers)


def _widths(layer: hopper.Shape | triton.Layer) -> tuple[int, int]:
    return layer.widths if isinstance(layer, triton.Layer) else (layer.width, layer.shared_width)


def _supported(
    backend: str, pair: str, width: int, shared_width: int, activations: ActivationPrecision | None = None
) -> bool:
    (routed, _), (shared, _) = HOPPER_PAIRS[pair]
    experts = ExpertSpec(1, shared_width, shared) if shared_width else None
    spec = LayerSpec("layer", 512, 3, ExpertSpec(8, width, routed), experts, activation=Activation(LIMIT))
    tried = [activations] if activations else ["bf16", "fp8"]
    return any(get(backend).supports(spec, precision) == () for precision in tried)


def test_the_sets_are_small() -> None:
    assert sum(len(calls) for calls in SETS.values()) <= 300
    assert all(len(set(calls)) == len(calls) for calls in SETS.values())
    assert len({shape.geometry for shape in hopper.SHAPES}) <= 35
    assert len(hopper.jobs()) <= 75  # of about ten seconds


def test_a_set_is_the_same_each_time() -> None:
    layers = {shape: shape.traits for shape in hopper.SHAPES}
    assert cover(layers, hopper.config) == list(SETS["hopper"])


@pytest.mark.parametrize("routing", LEAST_TOKENS)
def test_a_routing_is_what_its_name_says_at_the_fewest_tokens(routing: str) -> None:
    """At one token less it could not be; ``random`` is itself at none."""
    for tokens in (m for m in TOKENS if m >= max(LEAST_TOKENS[routing], 1)):
        assert HOLDS[routing](get_case(routing, tokens, 3, 8, 16)), tokens
        if routing != "random":
            assert not HOLDS[routing](get_case("random", tokens, 3, 8, 16)), tokens


def _used(case: Case) -> set[int]:
    return set(case.topk_ids.flatten().tolist())


HOLDS = {
    "random": lambda case: all(len(set(row)) == 3 for row in case.topk_ids.tolist()) and not case.x.isnan().any(),
    "all_on_one_expert": lambda case: _used(case) == {-1, 7} and (case.topk_ids >= 0).any(-1).all(),
    "half_experts_empty": lambda case: (
        len(_used(case)) == 4 and all(len(set(row)) == 3 for row in case.topk_ids.tolist())
    ),
    "absent_ids": lambda case: -1 in _used(case) and len(_used(case)) > 1,
    "duplicate_ids": lambda case: (case.topk_ids == case.topk_ids[:, :1]).all() and (case.topk_ids >= 0).all(),
    "nan_padding": lambda case: case.num_valid_tokens and case.x[case.num_valid_tokens :].isnan().any(),
    "zero_rows": lambda case: (case.x == 0).all(-1).any() and case.x.any(),
    "tiny_amax": lambda case: (case.x.abs().amax(-1).float() - TINY).abs().min() < TINY / 100,
}


def test_other_routings_are_run_too() -> None:
    for calls in SETS.values():
        assert {routing for _, _, routing in calls} == {*LEAST_TOKENS, *OTHERS}
    assert {*LEAST_TOKENS, *OTHERS, "no_tokens"} == set(CASE_NAMES)
