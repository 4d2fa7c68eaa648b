"""The table of tuned tiles: what finds itself in it, that a hit or a miss is counted, logged and planned in words."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from math import inf

import pytest
import torch

import foldmoe.backends  # noqa: F401  registers the backends that plans ask
from foldmoe import FusionPolicy, Placement, plan_layer
from foldmoe.backends.base import Call
from foldmoe.backends.hopper import heuristics, tuned
from foldmoe.backends.hopper.backend import HopperBackend
from foldmoe.formats import Format
from foldmoe.moe import Activation, ExpertSpec, LayerSpec
from foldmoe.planner.devices import resolve
from foldmoe.report.plan_table import plan_table
from foldmoe.runtime.kernels import Compiler, compiling

pytest.importorskip("triton", reason="NOT CHECKED: the Hopper backend needs triton (pip install foldmoe[gpu])")
from foldmoe.backends.hopper import launch
from foldmoe.planner import CheckpointPlan
from tests.hopper import tuned_table

FLASH = heuristics.Geometry(4096, 16, 16, 16, 16, 16, 16, 1, 10.0, 10.0)
SHARED = ExpertSpec(1, 2048, Format.FP8_128x128, e8m0_scales=True)
ENTRY = tuned.Entry("H200", 4096, 2048, 2048, 128, 384, 6.0, 8, 16, 4, 90.0, 100.0)


def spec(experts: int, top_k: int = 6) -> LayerSpec:
    routed = ExpertSpec(experts, 2048, Format.MXFP4)
    return LayerSpec("layers.3.ffn", 4096, top_k, routed, SHARED, Activation(10.0), Activation(10.0), "fp8")


@pytest.fixture
def only_384(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "table", lambda: (ENTRY,))
    tuned.choose.cache_clear()
    yield
    tuned.choose.cache_clear()


def outline(layer: LayerSpec, device: str = "h200") -> object:
    return HopperBackend().outline(layer, "fp8", resolve(device))


def compile_nothing(layer: object, tokens: int, top_k: int) -> None:
    x = torch.empty(tokens, 4096, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device="meta")
    with compiling(Compiler(lambda name: False, lambda kernel: None)):
        layer.forward(Call(x, ids, torch.empty(tokens, top_k, device="meta")), folded=True)


@pytest.mark.usefixtures("only_384")
def test_case_92_one_expert_more_finds_the_entry_and_a_miss_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="foldmoe")
    for experts, top_k, source in ((384, 6, "tuned"), (385, 7, "tuned"), (600, 6, "heuristic")):
        layer = outline(spec(experts, top_k))
        rows = round(6 * experts / top_k)
        caplog.clear()
        compile_nothing(layer, rows, top_k)
        compile_nothing(layer, rows, top_k)
        layer.weights.strays = torch.zeros(1, dtype=torch.int64)
        layer.weights.up.codes = torch.empty(0)  # stats() asks where the layer is
        stats = layer.stats()
        assert (stats["tuned"], stats["heuristic"]) == ((2, 0) if source == "tuned" else (0, 2)), experts
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.endswith(f"({source})"), line
        assert f"{experts} experts" in line
    plans = [plan_layer(spec(n), FusionPolicy(backend="hopper"), "h200") for n in (384, 385, 600)]
    assert plans[0].tiles == plans[1].tiles == "tuned around 6 routes an expert, heuristic elsewhere"
    assert plans[2].tiles == "heuristic: no tuned entry for 600 experts of these sizes on h200"


@pytest.mark.usefixtures("only_384")
def test_what_an_entry_does_not_speak_for() -> None:
    def source(
        geometry: heuristics.Geometry = FLASH, rows: int = 384, experts: int = 384, gpu: str = "NVIDIA H200"
    ) -> str:
        return tuned.choose(geometry, rows, 6.0, experts, gpu).source

    assert source() == "tuned"
    assert source(replace(FLASH, limit4=inf)) == "tuned"
    assert source(gpu="NVIDIA H100 80GB HBM3") == "heuristic"
    assert source(gpu="") == "heuristic"
    assert source(replace(FLASH, hidden=5120)) == "heuristic"
    assert source(replace(FLASH, k_down4=18)) == "heuristic"
    assert source(replace(FLASH, up8=0, down8=0, k_down8=0, scale_groups=0)) == "heuristic"
    assert source(replace(FLASH, scale_groups=4)) == "heuristic"
    assert source(rows=192) == "heuristic"
    assert source(rows=768) == "heuristic"


@pytest.mark.usefixtures("only_384")
def test_an_unknown_shape_takes_the_heuristics_config() -> None:
    choice = tuned.choose(FLASH, 8192, 6.0, 384, "NVIDIA H200")
    assert choice.entry is None
    assert choice.config == heuristics.choose(FLASH, 8192, 6.0, 384)


def test_an_entry_of_the_heuristics_tiles_leaves_neighbours_to_the_heuristic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "table", lambda: (replace(ENTRY, microseconds=100.0),))
    tuned.choose.cache_clear()
    for rows in (384, 500):
        choice = tuned.choose(FLASH, rows, 6.0, 384, "H200")
        assert choice.source == "tuned"
        assert choice.config == heuristics.choose(FLASH, rows, 6.0, 384)
    tuned.choose.cache_clear()


def test_the_nearest_of_several_entries_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    near = replace(ENTRY, routes_per_expert=7.0, tokens=16)
    monkeypatch.setattr(tuned, "table", lambda: (ENTRY, near))
    tuned.choose.cache_clear()
    assert tuned.choose(FLASH, 400, 6.0, 384, "H200").entry == ENTRY
    assert tuned.choose(FLASH, 440, 6.0, 384, "H200").entry == near
    tuned.choose.cache_clear()


@pytest.mark.parametrize(
    "entry", tuned.table(), ids=lambda e: f"{e.gpu}-{e.hidden}-{e.experts}-{e.routes_per_expert:g}"
)
def test_shipped_entries_fit_and_those_that_replace_the_heuristics_tiles_differ_from_them(entry: tuned.Entry) -> None:
    groups = entry.sizes.scale_groups
    steps = entry.sizes.routed_steps, entry.sizes.shared_steps
    geometry = heuristics.Geometry(entry.hidden, 1, 1, 1, 1, *steps, groups, 10.0, 10.0)
    config = entry.config(geometry)
    assert config.stages >= 4
    routes = entry.routes_per_expert * entry.experts
    if entry.replaces:
        assert entry.microseconds < tuned_table.MARGIN * entry.heuristic_microseconds
        assert config != heuristics.choose(geometry, max(1, round(routes / 6)), 6.0, entry.experts)
    assert tuned.choose(geometry, 1, routes, entry.experts, f"NVIDIA {entry.gpu}").entry == entry


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("entry", tuned.table(), ids=lambda e: f"{e.tokens}-{e.shared_tokens}-{e.warpgroups}")
def test_shipped_entries_compile(entry: tuned.Entry) -> None:
    from tests.hopper.test_compile import check

    check(entry.config(FLASH))


def test_plan_says_it_and_ranks_need_not_agree_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "table", lambda: (replace(ENTRY, experts=256, routes_per_expert=48),))
    plan = plan_layer(spec(256), FusionPolicy(backend="hopper"), "h200")
    assert plan.tiles == "tuned around 48 routes an expert, heuristic elsewhere"
    assert plan.as_dict()["tiles"] == plan.tiles
    assert replace(plan, tiles="").digest == plan.digest
    half = plan_layer(spec(256), FusionPolicy(backend="hopper"), "h200", Placement(ep_size=8))
    assert "no tuned entry for 32 experts" in half.tiles
    from rich.console import Console

    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(plan_table(CheckpointPlan("here", resolve("h200"), Placement(), (plan,))))
    assert f"layers.3.ffn: tiles of hopper: {plan.tiles}" in console.export_text()
    assert plan_layer(spec(256), FusionPolicy(backend="triton"), "h200").tiles == ""


def test_measured_times_become_entries() -> None:
    layer = outline(spec(384))
    layer.weights.gpu = "NVIDIA H200"
    usual = heuristics.choose(FLASH, 384, 6.0, 384)
    other = heuristics.build(FLASH, 8, 16, 4)
    assert usual != other
    kept = tuned_table.merge([], layer.weights, 6.0, {usual: 100.04, other: 90.0}, usual)
    assert kept == [replace(ENTRY, heuristic_microseconds=100.0)]
    assert [tuned.Entry(**entry) for entry in json.loads(tuned_table.text(kept))] == kept
    (as_usual,) = tuned_table.merge(kept, layer.weights, 6.0, {usual: 90.0, other: 89.9}, usual)
    assert (as_usual.tokens, as_usual.shared_tokens, as_usual.warpgroups) == (16, 128, 2)
    assert as_usual.microseconds == as_usual.heuristic_microseconds == 90.0
    elsewhere = replace(kept[0], experts=32)
    assert tuned_table.merge([elsewhere, *kept], layer.weights, 6.0, {usual: 100.0, other: 80.0}, usual) == [
        elsewhere,
        replace(kept[0], microseconds=80.0),
    ]


def test_the_file_is_as_the_tool_writes_it() -> None:
    assert tuned.TABLE.read_text() == tuned_table.text(tuned.table())
    assert all(set(asdict(entry)) == set(json.loads(tuned.TABLE.read_text())[0]) for entry in tuned.table())


def test_a_call_says_how_many_rows_tiles_are_for() -> None:
    """As ranks of a group do, so that all choose alike; a batch is cut, and tiles follow the largest part."""
    weights = outline(spec(256)).weights

    def chosen(rows: int, most: int | None = None) -> heuristics.HopperConfig:
        ids = torch.empty(rows, 6, dtype=torch.int32, device="meta")
        call = Call(torch.empty(rows, 4096, device="meta"), ids, ids.float(), most_rows=most)
        return launch.choose(weights, call, 1.0).config

    assert chosen(3, 4096) == chosen(4096) != chosen(3)
    assert chosen(4096, 3) == chosen(4096)
    assert chosen(3, 10 * launch.MAX_TOKENS) == chosen(launch.MAX_TOKENS)
