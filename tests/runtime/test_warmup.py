"""Warming up: outlines start what packed layers start, the sizes meet every variant, nothing is left to compile."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import foldmoe
from foldmoe import FoldedMoE, FusionPolicy, LayerPlan
from foldmoe.backends import Call, PackedLayer, get
from foldmoe.cli.main import app
from foldmoe.moe import Placement
from foldmoe.parallel import ExpertParallelMoE, simulate
from foldmoe.planner.devices import Device, resolve
from foldmoe.runtime import kernel_cache, kernels
from foldmoe.runtime.kernels import Compiler, compiling
from foldmoe.runtime.offline import standing_in
from foldmoe.warming import Calls, Report, compile_ahead, compile_beside, processes, sizes
from foldmoe.warming.variants import walk
from tests.runtime import support

pytest.importorskip("triton", reason="NOT CHECKED: warming up needs triton (pip install foldmoe[gpu])")

ROOT = Path(__file__).parents[2]
TINY = Path(foldmoe.__file__).parent / "assets" / "tiny-v4"


def call(tokens: int, device: str, **more: object) -> Call:
    x = torch.zeros(tokens, support.HIDDEN, dtype=torch.bfloat16, device=device)
    ids = torch.zeros(tokens, support.TOP_K, dtype=torch.int32, device=device)
    return Call(x, ids, torch.zeros(tokens, support.TOP_K, device=device), **more)


def variants(
    layer: PackedLayer, device: str, tokens: tuple[int, ...], arm: str, **more: object
) -> set[tuple[object, ...]]:
    """All that the calls start, wherever the tensors are."""
    found = Compiler(lambda name: False, lambda kernel: None)
    with compiling(found):
        for count in tokens:
            if arm == "dual":
                layer.forward_dual(call(count, device, **more), None)
            else:
                layer.forward(call(count, device, **more), folded=arm == "folded")
    return {tuple(part for part in key if part != torch.device(device)) for key in found._met}


@pytest.mark.parametrize("arm", ["folded", "serial", "dual"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_an_outline_starts_what_the_packed_layer_starts(backend: str, arm: str) -> None:
    plan, tokens = support.plan(backend), (1, 2, 17, 64, 300, 2048)
    outline = get(backend).outline(plan.spec, plan.activations, resolve("h200"))
    real = support.packed(plan)
    assert outline.nbytes == pytest.approx(real.nbytes, rel=0.01)
    assert variants(outline, "meta", tokens, arm) == variants(real, "cpu", tokens, arm)


@pytest.mark.parametrize("arm", ["folded", "serial", "dual"])
@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_a_rank_without_tokens_starts_what_all_ranks_start(backend: str, arm: str) -> None:
    """``warm`` has compiled no other kernels, and other ranks would not wait for a compiler."""
    plan = support.plan(backend)
    layer, tokens = get(backend).outline(plan.spec, plan.activations, resolve("h200")), (8, 300)
    usual = variants(layer, "meta", tokens, arm, shared_rows=(0, 4), most_rows=300)
    assert variants(layer, "meta", tokens, arm, shared_rows=(4, 4), most_rows=300) == usual


@pytest.mark.parametrize(("backend", "device"), [("hopper", "h200"), ("triton", "h200"), ("triton", "mi300x")])
def test_sizes_meet_every_variant_of_all_batches_up_to_the_largest(backend: str, device: str) -> None:
    plan, most = support.plan(backend, device=device), 1100

    def count(tokens: tuple[int, ...]) -> list[str]:
        calls = Calls(tokens, ids=(torch.int32,))
        return sorted(walk([plan], calls, resolve(device), lambda name, before: False, lambda kernel: None))

    assert len(sizes(most)) < 310
    assert count(sizes(most)) == count(tuple(range(1, most + 1)))


@pytest.mark.parametrize("backend", ["hopper", "triton"])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "native"), (2, "native"), (1, "slot"), (2, "slot")])
def test_what_makes_routes_a_ranks_own_is_found_too(backend: str, ranks: int, strategy: str) -> None:
    """One launch before the layer's, where there are other ranks or a slot."""
    plan = replace(support.plan(backend), placement=Placement(ranks, 0), strategy=strategy)
    calls = Calls((8,), ids=(torch.int32,))
    found = walk([plan], calls, resolve("h200"), lambda name, before: False, lambda kernel: None)
    assert found.count("rank_routes") == (0 if (ranks, strategy) == (1, "native") else 1)


@pytest.mark.parametrize("most", [1, 2, 255, 256, 257, 300])
def test_sizes_end_at_the_largest(most: int) -> None:
    assert sizes(most)[0] == 1
    assert max(sizes(most)) == most
    assert len(set(sizes(most))) == len(sizes(most))


def test_kernels_are_found_in_the_cache_whichever_batch_came_first() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runtime.cache_keys"]
    ahead, engine = (
        subprocess.Popen([*command, *tokens], env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for tokens in (("1", "64", "2048"), ("2048", "64", "1"))
    )
    keys = ahead.communicate(timeout=120)[0].splitlines()
    assert {"hopper list_tiles", "hopper prologue", "triton prepare"} <= {line.rpartition(" ")[0] for line in keys}
    assert engine.communicate(timeout=120)[0].splitlines() == keys


def test_nothing_is_compiled_after_compiling_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setenv("FOLDMOE_CACHE_DIR", str(tmp_path / "kernels"))
    plan, calls, seen = support.plan("triton"), Calls((1,), ids=(torch.int32,)), []
    report = compile_ahead(
        [plan, replace(plan, spec=replace(plan.spec, name="layers.2.mlp"))],
        calls,
        resolve("h200"),
        processes=2,
        progress=lambda done, total, line: seen.append((done, total)),
    )
    total = len(report.compiled)
    assert total == 4  # prepare, up, down, combine
    assert not report.cached
    assert seen == [(i + 1, total) for i in range(total)]
    assert report.folder == str(tmp_path / "kernels")
    hits: list[bool] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    layer = support.packed(plan)
    with standing_in("cuda", "sm_90"), kernel_cache.used(), compiling(Compiler(lambda name: True, lambda kernel: None)):
        for tokens in calls.tokens:
            layer.forward(call(tokens, "cpu"), folded=True)
    assert hits == [True] * total


def test_compiling_beside_does_not_wait_and_shows_the_workers_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOLDMOE_CACHE_DIR", str(tmp_path / "kernels"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    found: list[Report | Exception] = []
    plan, calls = support.plan("triton"), Calls((1,), ids=(torch.int32,))
    thread = compile_beside([plan], calls, resolve("h200"), processes=2, done=found.append)
    assert not found
    thread.join(60)
    (report,) = found
    assert isinstance(report, Report)
    assert sorted(report.compiled) == sorted(compile_ahead([plan], calls, resolve("h200"), processes=1).cached)

    monkeypatch.setattr(sys, "executable", "no process is started for no plans")
    compile_beside([], calls, resolve("h200"), processes=2, done=found.append).join(60)
    assert isinstance(found[-1], Report)

    monkeypatch.setattr(sys, "executable", script(tmp_path, 'echo "$CUDA_VISIBLE_DEVICES|" >&2; exit 1'))
    compile_beside([plan], calls, resolve("h200"), processes=1, done=found.append).join(60)
    assert str(found[-1]).endswith(":\n|\n")


def script(folder: Path, line: str) -> str:
    """A program that stands for the interpreter of the workers."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\ncat > /dev/null\n{line}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("backend", ["hopper", "triton"])
def test_case_66_a_new_batch_size_during_capture_is_a_clear_error(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = support.packed(support.plan(backend))
    warm = Compiler(lambda name: False, lambda kernel: None)
    with compiling(warm):
        layer.forward(call(4, "cpu"), folded=True)
    started = []
    monkeypatch.setattr(kernels, "_started", dict.fromkeys(warm._met))
    monkeypatch.setattr(kernels, "capturing", lambda device: True)
    for key in warm._met:
        monkeypatch.setattr(type(key[0]), "__getitem__", lambda kernel, grid: lambda *a, **n: started.append(kernel))
    layer.forward(call(4, "cpu"), folded=True)
    assert len(started) == len(warm._met)
    with pytest.raises(
        RuntimeError, match="would be compiled during a CUDA graph capture; warm up first: call"
    ) as told:
        layer.forward(call(700, "cpu"), folded=True)
    assert "foldmoe.warmup(layer, tokens)" in str(told.value)


def test_a_kernel_that_does_not_compile_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\ncat > /dev/null\necho ptxas: no such luck >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(RuntimeError, match=r"a kernel did not compile:\nptxas: no such luck"):
        compile_ahead([support.plan("triton")], Calls((1,)), resolve("h200"), processes=2)


def test_a_worker_that_dies_before_its_job_is_there_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dead = tmp_path / "python"
    dead.write_text("#!/bin/sh\necho out of memory >&2\nexit 3\n")
    dead.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(dead))
    monkeypatch.setattr(processes.pickle, "dumps", lambda job: bytes(1 << 20))  # more than a pipe holds
    with pytest.raises(RuntimeError, match=r"a kernel did not compile:\nout of memory"):
        compile_ahead([support.plan("triton")], Calls((1,)), resolve("h200"), processes=2)


def test_no_worker_is_left_where_another_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", script(tmp_path, "exec sleep 60"))
    spawn, workers = processes._spawn, []

    def few(*arguments: Any) -> Any:
        if len(workers) == 2:
            raise BlockingIOError("Resource temporarily unavailable")
        workers.append(spawn(*arguments))
        return workers[-1]

    monkeypatch.setattr(processes, "_spawn", few)
    with pytest.raises(BlockingIOError, match="temporarily unavailable"):
        compile_ahead([support.plan("triton")], Calls((1, 300)), resolve("h200"), processes=3)
    assert len(workers) == 2
    assert all(worker.poll() is not None for worker in workers)


def test_devices_that_kernels_cannot_be_compiled_for() -> None:
    plan = support.plan("triton")
    with pytest.raises(ValueError, match="can only be compiled on it: its shared memory is not known here"):
        compile_ahead([plan], Calls((1,)), Device("RTX 6000", "cuda", "sm_120"))
    with pytest.raises(ValueError, match="hopper on a100: needs a Hopper GPU"):
        compile_ahead([support.plan("hopper")], Calls((1,)), resolve("a100"))


def test_warmup_runs_every_layer_at_every_size() -> None:
    layers = [FoldedMoE(*support.weights(), policy=FusionPolicy(backend="torch"), top_k=2) for _ in range(2)]
    met: list[tuple[int, torch.dtype, bool]] = []

    def note(module: torch.nn.Module, given: tuple[torch.Tensor, ...], named: dict[str, object]) -> None:
        met.append((len(given[0]), given[1].dtype, "num_valid_tokens" in named))

    for layer in layers:
        layer.register_forward_pre_hook(note, with_kwargs=True)
    model = torch.nn.Sequential(*layers)
    assert foldmoe.warmup(model, [1, 5], on_device=["num_valid_tokens"]) == 8
    assert met == [(m, kind, True) for m in (1, 5) for kind in (torch.int32, torch.int64)] * 2


def test_warmup_runs_a_layer_over_all_its_ranks() -> None:
    """Exchange kernels too, which no plan of a rank's own layer holds."""
    policy, group = FusionPolicy(backend="torch"), simulate(2)
    layers = [
        FoldedMoE(*support.weights(), policy=policy, top_k=2, placement=Placement(2, rank), name="moe")
        for rank in range(2)
    ]
    moe = ExpertParallelMoE(layers, group, max_tokens_per_rank=8, count_load=True)
    assert foldmoe.warmup(moe, [1, 8]) == 4
    assert moe.stats()["tokens"] == 16
    assert group.moved.any()
    assert not moe.load().any()
    with pytest.raises(ValueError, match="rank 0 has 9 tokens"):
        foldmoe.warmup(moe, [9])


def test_warmup_says_what_it_cannot_warm() -> None:
    with pytest.raises(ValueError, match="no FoldedMoE in Linear"):
        foldmoe.warmup(torch.nn.Linear(2, 2), [1])
    layer = FoldedMoE(*support.weights(), policy=FusionPolicy(backend="torch"), name="layers.3.mlp")
    with pytest.raises(ValueError, match=r"layers\.3\.mlp: top-k is not known"):
        foldmoe.warmup(layer, [1])
    with pytest.raises(ValueError, match="batch sizes must be 1 or more"):
        foldmoe.warmup(layer, [0])
    with pytest.raises(ValueError, match="on_device knows num_valid_tokens and shared_rows, found x"):
        foldmoe.warmup(layer, [1], on_device=["x"])


def test_the_command_refuses_a_cpu_and_says_where_there_is_nothing_to_do() -> None:
    run = CliRunner().invoke(app, ["warmup", str(TINY), "--device", "cpu"])
    assert run.exit_code == 2
    assert "no GPU to compile for" in run.output
    run = CliRunner().invoke(app, ["warmup", str(TINY), "--device", "h200", "--fold", "stock"])
    assert run.exit_code == 0
    assert "nothing to compile" in run.output


def test_the_command_reports_and_plans_for_the_rank_with_fewer_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[LayerPlan], Calls]] = []

    def compiled(plans: list[LayerPlan], calls: Calls, device: Device, **_: object) -> Report:
        asked.append((plans, calls))
        return Report(device.name, ["up", "down"], ["combine"], 12.3, "/kernels")

    monkeypatch.setattr("foldmoe.cli.warmup.compile_ahead", compiled)
    words = ["warmup", str(TINY), "--device", "h200", "--tokens", "1,8", "--on-device", "num_valid_tokens"]
    run = CliRunner().invoke(app, [*words, "--ep", "3"])
    assert run.exit_code == 0, run.output
    assert "2 kernels compiled, 1 in cache already, for h200, in 12 s, kept in /kernels" in run.output
    ((plans, calls),) = asked
    assert (calls.tokens, calls.on_device) == ((1, 8), ("num_valid_tokens",))
    held = {len(plan.placement.experts(plan.spec.routed.count)) for plan in plans}
    count = plans[0].spec.routed.count
    assert held == {-(-count // 3), count // 3}
    assert len(held) == 2
    CliRunner().invoke(app, [*words, "--ep", "2"])
    assert {plan.placement.ep_rank for plan in asked[1][0]} == {0}
