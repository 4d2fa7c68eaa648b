"""The cost model: bytes as a simulation counts them, times from stated rates, and nothing without a source."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from foldmoe.bench.parallel.fit import expected, fit, paced_by_the_host
from foldmoe.bench.parallel.result import ParallelRequest, ParallelResult, ParallelRow
from foldmoe.cli.main import app
from foldmoe.moe import Placement
from foldmoe.parallel import Scheme, Tokens, simulate
from foldmoe.parallel.estimate import Estimate, Phases, estimate, local_work, remote_rows
from foldmoe.parallel.exchange_times import MEASURED, Cost
from foldmoe.parallel.kernel_times import Floor, Measured
from foldmoe.parallel.links import find_link
from foldmoe.parallel.scheme import largest_buffers
from foldmoe.planner import CheckpointPlan, FusionPolicy, plan_checkpoint
from foldmoe.planner.devices import KNOWN, Device
from tests.parallel.support import HIDDEN, TOP_K, virtual, weights_of
from tests.support.sparse import v4_checkpoint

WIDE = {"COLUMNS": "200"}


@pytest.fixture
def flash(tmp_path: Path) -> CheckpointPlan:
    """Three layers of DeepSeek-V4-Flash's size on eight H200."""
    v4_checkpoint(tmp_path, hidden=4096, width=2048, layers=3, experts=256, block=128, drafts=0, draft_experts=8)
    return plan_checkpoint(tmp_path, policy=FusionPolicy(backend="torch"), ep_size=8, device="h200")


@pytest.mark.parametrize("strategy", ["all_gather", "all_to_all"])
@pytest.mark.parametrize("experts", [12, 10])
def test_bytes_are_what_a_simulation_moves(experts: int, strategy: Any) -> None:
    """Every rank brings each choice of experts once, which makes averages exact."""
    chosen, ranks = torch.combinations(torch.arange(experts), TOP_K), 4
    tokens, group = len(chosen), simulate(ranks)
    moe = virtual(weights_of(experts), group, strategy=strategy, max_tokens_per_rank=tokens, activations="fp8")
    x, weights = torch.randn(tokens, HIDDEN).to(torch.bfloat16), torch.rand(tokens, TOP_K)
    parts = [moe.route(rank, Tokens(x, chosen, weights), 1.0) for rank in range(ranks)]
    batches = moe.dispatch(parts, tokens)
    arrived = int(group.moved[:, 0].sum())
    group.moved.zero_()
    moe.combine(batches, [torch.zeros_like(batch.call.x) for batch in batches])
    returned = int(group.moved[0].sum())
    gathers = strategy == "all_gather"
    rows = round(tokens * (ranks - 1 if gathers else remote_rows(moe.scheme)))
    assert arrived == rows * moe.scheme.wire.row_bytes + (0 if gathers else 8 * ranks * (ranks - 1))  # and counts
    assert returned == rows * moe.scheme.result_bytes


def test_local_work_is_the_benchmarks_floor(flash: CheckpointPlan) -> None:
    """Shape B, one rank of eight: 22.8 us at 1 token and 2022 us at 8192 on an H200, without an efficiency."""
    floor = Floor.of(KNOWN["h200"], fp8=True)
    for tokens, microseconds in ((1, 22.8), (8, 81), (128, 98), (2048, 505), (8192, 2022)):
        assert floor.seconds(*local_work(flash.layers[0], tokens)) * 1e6 == pytest.approx(microseconds, rel=0.07)


def test_times_follow_from_rates(flash: CheckpointPlan) -> None:
    found = estimate(flash, [128], link="100", efficiency=1.0)
    gather, scatter = found.rows[:2]
    assert (gather.strategy, scatter.strategy) == ("all_gather", "all_to_all")
    assert gather.dispatch_bytes == 128 * 7 * 4176
    assert gather.combine_bytes == 128 * 7 * 2 * 4096
    exchange = MEASURED["all_gather"]
    own = gather.dispatch - exchange.dispatch.fixed - gather.dispatch_bytes * exchange.dispatch.per_byte
    assert own == pytest.approx(gather.dispatch_bytes / 100e9)
    assert gather.total == gather.dispatch + gather.local + gather.combine + exchange.together
    assert scatter.dispatch_bytes < 0.6 * gather.dispatch_bytes
    half = estimate(flash, [128], link="100", efficiency=0.5).rows[0]
    assert half.local == pytest.approx(2 * gather.local)
    assert half.dispatch == gather.dispatch
    scheme = Scheme.of(flash.layers[0], 128, dispatch="all_to_all")
    assert found.buffers["all_to_all"] == sum(scheme.buffers().values())


def bench_file(path: Path, spec: str) -> Path:
    rows = [
        {"arm": "hopper folded", "tokens": 16, "seconds": 100e-6},
        {"arm": "hopper folded", "tokens": 64, "seconds": 400e-6},
        {"arm": "hopper serial", "tokens": 32, "seconds": 1.0},
    ]
    path.write_text(json.dumps({"spec": spec, "rows": rows}))
    return path


B = "H 4096, routed 32x2048 mxfp4, shared 1x2048 fp8_128x128 e8m0, top-6"


def test_measured_times_come_before_the_floor(flash: CheckpointPlan, tmp_path: Path) -> None:
    table = Measured.read(bench_file(tmp_path / "b.json", B))
    assert [table.at(n) for n in (16, 64, 15, 65)] == [100e-6, 400e-6, None, None]
    assert table.at(32) == pytest.approx(200e-6)
    rows = estimate(flash, [8, 32], measured=table).rows[:6]
    assert [row.source for row in rows] == ["floor"] * 3 + ["table"] * 3
    assert rows[3].local == pytest.approx(200e-6)
    with pytest.raises(ValueError, match=r"measured: H 1, .*; one rank of layers\.0\.ffn is: H 4096, routed 32x2048"):
        estimate(flash, [8], measured=replace(table, spec="H 1, routed, shared, top-6"))


def test_the_hopper_backend_has_a_fit(flash: CheckpointPlan) -> None:
    """README's table of shape A: 1 to 8192 tokens within 13 %, without a stated efficiency."""
    floor = Floor.of(KNOWN["h200"], fp8=True)
    layer = replace(flash.layers[0], backend="hopper", placement=Placement())
    readme = {1: 36.7, 8: 158, 32: 464, 128: 892, 512: 1075, 2048: 1709, 8192: 4933}
    for tokens, microseconds in readme.items():
        assert floor.hopper_seconds(*local_work(layer, tokens)) * 1e6 == pytest.approx(microseconds, rel=0.13)
    hopper = replace(flash, rows=(replace(flash.layers[0], backend="hopper"), *flash.rows[1:]))
    assert [row.source for row in estimate(hopper, [8]).rows] == ["fit"] * 3 + ["floor"] * 6
    assert {row.source for row in estimate(hopper, [8], efficiency=0.5).rows} == {"floor"}


PAGE = Path(__file__).parents[2] / "docs" / "parallel.md"


FOLDS = {"folded": ("native", "folded"), "dual-stream": ("native", "dual-stream"), "slot": ("slot", "folded")}


def measured_rows(*columns: str) -> list[tuple[str, int, str, dict[str, float]]]:
    """Shape, tokens, transport and microseconds of the documentation's tables that have these columns."""
    found, shape, heads = [], "", list[str]()
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if line.startswith("Shape "):
            shape = line.split()[1].rstrip(":,")
        elif line.startswith("| tokens | transport |"):
            heads = cells if set(columns) <= set(cells) else []
        elif heads and line.startswith("| ---"):
            continue
        elif heads and line.startswith("|"):
            row = dict(zip(heads, cells, strict=True))
            times = {name: float(row[name].replace(",", "")) for name in columns}
            found.append((shape, int(row["tokens"]), row["transport"], times))
        else:
            heads = []
    transports = "allgather", "alltoall", "symmetric"
    assert {row[:3] for row in found} == set(product("AD", (1, 8, 32, 128, 512, 2048), transports))
    return found


def test_the_model_meets_what_was_measured() -> None:
    """Every documented row of the folded layer: symmetric memory and all-gather within 15 %, all-to-all within 22 %."""
    for shape, tokens, transport, times in measured_rows("dispatch", "local", "combine", "total"):
        _, model = modelled(shape, tokens, transport, "folded", times)
        assert model.source == "fit"
        off = 0.22 if transport == "alltoall" else 0.15
        assert model.total * 1e6 == pytest.approx(times["total"], rel=off), (shape, tokens, transport)
        assert model.local * 1e6 == pytest.approx(times["local"], rel=0.15), (shape, tokens, transport)


def test_the_model_meets_the_other_folds_too() -> None:
    """Totals of two streams and of the slot scheme: within 23 %. The constants of an all-to-all are these rows' fit."""
    parts = {row[:3]: row[3] for row in measured_rows("dispatch", "local", "combine", "total")}
    paced = []
    for shape, tokens, transport, totals in measured_rows(*FOLDS):
        for fold, total in totals.items():
            times = {**parts[shape, tokens, transport], "total": total}
            row, model = modelled(shape, tokens, transport, fold, times)
            assert model.total * 1e6 == pytest.approx(total, rel=0.231), (shape, tokens, transport, fold)
            paced += [(model, row)] if transport == "alltoall" else []
    fitted = paced_by_the_host(MEASURED["all_to_all"], paced, find_link("nvlink", KNOWN["h200"]).bandwidth)
    for name in ("together", "busy", "apart", "slot"):
        assert getattr(fitted, name) == pytest.approx(getattr(MEASURED["all_to_all"], name)), name


def modelled(shape: str, tokens: int, transport: str, fold: str, times: dict[str, float]) -> tuple[ParallelRow, Phases]:
    """A documented row as the benchmark wrote it, and what the model says of it."""
    scheme, arm = FOLDS[fold]
    request = ParallelRequest(shape, (tokens,), transports=(transport,), arms=(arm,), schemes=(scheme,))
    seconds = (times[name] * 1e-6 for name in ("dispatch", "local", "combine", "total"))
    row = ParallelRow(
        tokens, transport, scheme, arm, *seconds,
        0, 0, graph=True, sent=0, bound=None, predicted=None, same_bits=None,
    )  # fmt: skip
    result = ParallelResult(request, "", "", 2, "hopper", 0.0, "", {})
    return row, expected(result, row)


@pytest.mark.parametrize("cost", [Cost(10e-6, 2e-12), Cost(100e-6, 0.0)])
def test_a_fit_finds_the_constants_that_made_its_points(cost: Cost) -> None:
    points = [(n, cost.seconds(n, 4e11)) for n in (1e3, 1e5, 3e6)]
    found = fit(points, 4e11)
    assert found.fixed == pytest.approx(cost.fixed, rel=1e-6)
    assert found.per_byte == pytest.approx(cost.per_byte, rel=1e-6, abs=1e-18)


def test_links() -> None:
    assert find_link("nvlink", KNOWN["h200"]).bandwidth == 382e9
    assert find_link("ib400", KNOWN["mi300x"]).bandwidth == 50e9
    assert find_link("12.5", KNOWN["h200"]).bandwidth == 12.5e9
    for name, device, message in (
        ("nvlink", "mi300x", "no NVLink figure for mi300x"),
        ("token-ring", "h200", "unknown link 'token-ring'; expected nvlink, ib400 or GB/s"),
        ("-1", "h200", "unknown link"),
    ):
        with pytest.raises(ValueError, match=message):
            find_link(name, KNOWN[device])


def test_a_device_is_found_by_its_own_name_too() -> None:
    assert Floor.of(Device("NVIDIA H200", "cuda", "sm_90"), fp8=True) == Floor.of(KNOWN["h200"], fp8=True)
    assert Floor.of(KNOWN["a100"], fp8=True).operations == Floor.of(KNOWN["a100"], fp8=False).operations
    with pytest.raises(ValueError, match=r"no figures for cpu: an estimate needs a device that is known \(a100, "):
        Floor.of(KNOWN["cpu"], fp8=True)


def test_a_slot_is_read_in_the_routed_format(flash: CheckpointPlan) -> None:
    native = flash.layers[0]
    slot = replace(native, strategy="slot", requantize=True)
    shared, routed = (native.spec.shared, native.spec.routed)
    assert shared is not None
    saved = local_work(native, 1)[0] - local_work(slot, 1)[0]
    assert saved == shared.nbytes(4096) - routed.nbytes(4096)


@pytest.mark.parametrize("options", [{"tokens": []}, {"tokens": [0]}, {"efficiency": 0.0}, {"efficiency": 1.5}])
def test_impossible_requests_are_refused(flash: CheckpointPlan, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"tokens must be numbers|efficiency must lie"):
        estimate(flash, **{"tokens": [1]} | options)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["plan", *arguments], env=WIDE)
    return done.exit_code, done.output


def test_the_command_prints_times_and_what_they_rest_on(flash: CheckpointPlan, tmp_path: Path) -> None:
    base = (flash.source, "--ep", "8", "--device", "h200", "--backend", "torch", "--estimate", "--tokens", "1,128")
    code, output = run(*base)
    assert code == 0
    for text in (
        "layers.0..2.ffn: us a layer, tokens on each of 8 ranks",
        "all_to_all",
        "link: nvlink, 382 GB/s a direction (measured: plain copies",
        "symmetric",
        "exchanges: fixed times and times a byte as measured on two H200s",
        "rest: what a total takes beyond its phases",
        "local: floor at 4.62 TB/s and 1,427 TFLOP/s (measured, 8192^3), divided by an efficiency of 0.62",
        "uniform routing",
        "buffers a rank at 128 tokens, worst routing",
    ):
        assert text in output
    table = bench_file(tmp_path / "b.json", B)
    _, output = run(*base[:-1], "32,128", "--measured", str(table), "--link", "ib400")
    assert "link: ib400, 50 GB/s a direction" in output
    assert "local: measured in 6 of 12 rows" in output
    assert "symmetric" not in output  # no GPU writes to another's memory over InfiniBand
    assert "local elsewhere: floor at" in output


def test_json_carries_the_buffers_without_an_estimate(flash: CheckpointPlan) -> None:
    code, output = run(
        flash.source, "--ep", "8", "--device", "h200", "--backend", "torch", "--tokens", "1,128", "--json"
    )
    assert code == 0, output
    assert json.loads(output)["buffers"] == largest_buffers(flash.layers, 128)


def test_json_carries_the_estimate(flash: CheckpointPlan) -> None:
    code, output = run(flash.source, "--ep", "8", "--device", "h200", "--backend", "torch", "--estimate", "--json")
    assert code == 0
    found = json.loads(output)["estimate"]
    assert len(found["rows"]) == 3 * 3 * 6
    assert found["rows"][0]["total"] > found["rows"][0]["local"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tokens", "1,few"), "--tokens takes whole numbers with commas between"),
        (("--device", "cpu"), "no NVLink figure for cpu"),
        (("--tp", "2"), "an estimate covers expert parallelism alone"),
        (("--measured", "config.json"), "is no result of 'foldmoe bench layer --out'"),
    ],
)
def test_errors_are_for_people(flash: CheckpointPlan, arguments: tuple[str, ...], message: str) -> None:
    if arguments[0] == "--measured":
        arguments = ("--measured", f"{flash.source}/config.json")
    code, output = run(flash.source, "--ep", "2", "--device", "h200", "--backend", "torch", "--estimate", *arguments)
    assert code == 2
    assert message in output
    assert "Traceback" not in output


def test_layers_without_an_estimate_are_named(flash: CheckpointPlan) -> None:
    unknown = replace(flash.layers[0], spec=replace(flash.layers[0].spec, top_k=-1))
    found = estimate(replace(flash, rows=(unknown, *flash.rows[1:])), [1])
    assert isinstance(found, Estimate)
    assert found.skipped == ("layers.0.ffn: top-k is not known",)
    assert {row.layer for row in found.rows} == {"layers.1.ffn", "layers.2.ffn"}
