"""Reports of the field on measuring served models: each as a small benchmark that must not be fooled."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from rich.console import Console

from foldmoe.bench.serve import summary
from foldmoe.report.serve_table import remarks, serve_table
from tests.bench_serve.support import NAME, asked, bench, faulty, run, server

if TYPE_CHECKING:
    from pathlib import Path

    from foldmoe.bench.serve.results import ServeResult

SLOW = 0.5
"""Seconds that the fake server loses in its slow first request; four times as many in one that compiles."""


def shown(result: ServeResult) -> str:
    console = Console(width=200, record=True)
    console.print(serve_table(result))
    return console.export_text()


def test_case_86_a_fresh_servers_slow_first_reply_is_spent_before_anything_is_measured(tmp_path: Path) -> None:
    result, _ = bench(asked(faulty("slow-first"), repeats=2), tmp_path)
    assert all(max(found.latencies) < SLOW for found in result.runs)
    assert "warm-up: every server ran all workloads once" in shown(result)


def test_case_86_a_compile_in_one_measured_run_leaves_the_median_and_is_reported(tmp_path: Path) -> None:
    command = faulty("compile", once=tmp_path / "compiled")  # as with a cache on disk: the first server alone compiles
    result, _ = bench(asked(command, repeats=3), tmp_path / "out")
    times = {found.repeat: max(found.latencies) for found in result.runs}
    assert times[1] > SLOW
    found = summary.spread(result, "folded", NAME, "mean_tpot_ms")
    assert found is not None
    assert found.high > 2 * found.median  # the slow run is in the range, not in the median
    assert found.without_first == pytest.approx(found.median, rel=1.0)
    (outlier,) = [o for o in summary.outliers(result) if o.run.repeat == 1]
    assert outlier.run.compiled == ("_gemm_kernel",)
    assert outlier.slowest == 2
    text = shown(result)
    assert "outlier: ours folded, repeat 1, 8/4 x2: took " in text
    assert "request 2 stands out; compiled _gemm_kernel" in text


def test_case_88_versions_and_the_token_limit_are_kept_and_the_share_of_short_answers_is_said(tmp_path: Path) -> None:
    result, _ = bench(asked(faulty("short")), tmp_path)
    assert result.workloads.workloads[0].output_len == 4
    assert result.servers[0].versions["vllm"] == "0.32.0+fake"
    (found,) = result.runs
    assert found.short / found.requested == pytest.approx(0.667, abs=1e-3)
    assert "invalid: ours folded, repeat 1, 8/4 x2: 4 of 6 answers (66.7%) do not have the 4 tokens" in shown(result)


def test_case_89_texts_that_agree_and_then_run_past_the_end_are_different_texts(tmp_path: Path) -> None:
    result, _ = bench(asked(faulty("other-texts:native"), ("serial", "folded"), again="serial"), tmp_path)
    assert summary.same_texts(result, "serial", "serial-again") == (6, 6)
    assert summary.same_texts(result, "serial", "folded") == (0, 6)
    assert "0/6" in shown(result)


def test_case_89_every_latency_is_kept_as_mean_median_and_tail(tmp_path: Path) -> None:
    result, _ = bench(asked(server()), tmp_path)
    for kind in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{part}_{kind}_ms" for part in ("mean", "median", "p50", "p95", "p99")} <= set(result.runs[0].metrics)


@pytest.mark.parametrize(
    ("fault", "arm", "message"),
    [
        ("wrong-arm", "serial", "rank 0 runs stock, not serial"),
        ("no-stream", "stock-dual-stream", "does not use vLLM's stream for shared experts"),
        ("no-state", "folded", "no rank of the server wrote its state"),
    ],
)
def test_case_90_an_arm_is_what_the_running_server_says_not_what_it_was_started_as(
    tmp_path: Path, fault: str, arm: str, message: str
) -> None:
    result, _ = bench(asked(faulty(fault), (arm,)), tmp_path)
    assert result.runs == []  # nothing is measured under a false label
    (failure,) = result.failures
    assert failure.where == "arm"
    assert message in failure.reason
    assert f"failed: {'ours ' if '-' not in arm else ''}" in shown(result)


def test_case_90_the_path_of_every_arm_is_printed(tmp_path: Path) -> None:
    result, _ = bench(asked(server(), ("stock-serial", "serial", "folded")), tmp_path)
    lines = remarks(result)
    assert "stock serial: MoE layers: 1 stock; runs as stock" in lines
    assert "ours serial: MoE layers: 1 serial; runs as serial" in lines
    assert "ours folded: MoE layers: 1 folded; runs as folded" in lines


def test_case_92_a_shape_without_a_tuned_table_is_said_for_its_arm_alone(tmp_path: Path) -> None:
    result, _ = bench(asked(faulty("untuned:native"), ("serial", "folded")), tmp_path)
    lines = [line for line in remarks(result) if "tuned" in line]
    assert lines == [
        "ours folded: no tuned table, generic kernel settings: /configs/E=385,N=2048,device_name=H200.json"
    ]


def test_case_93_a_refused_layer_and_its_reason_are_printed_by_default(tmp_path: Path) -> None:
    result, _ = bench(asked(faulty("mixed")), tmp_path)
    assert result.complete
    text = shown(result)
    assert "ours folded: MoE layers: 1 folded, 1 stock; runs as mixed" in text
    assert "model.layers.2.mlp.experts: shared expert is opaque" in text


def test_prompts_that_the_prefix_cache_answered_are_said(tmp_path: Path) -> None:
    result, _ = bench(asked(faulty("cache-hits")), tmp_path)
    assert "the prefix cache answered 50% of the prompt tokens; serve with --no-enable-prefix-caching" in shown(result)


def test_the_table_posts_changes_with_noise_and_keeps_losing_rows() -> None:
    result = asked("", ("serial", "folded"), repeats=3, again="serial")
    for arm, values in {"serial": (100, 100, 100), "folded": (80, 81, 82), "serial-again": (101, 101, 101)}.items():
        result.runs += [run(arm, number + 1, value) for number, value in enumerate(values)]
    text = shown(result)
    assert "ours serial -> ours folded" in text
    for part in ("100.0 -> 81.0", "-19.0%, later -18.5%", "noise 1.0%, worse"):
        assert part in text
    missing = replace(result, runs=[found for found in result.runs if found.arm == "serial"])
    assert "0 of 3" in shown(missing)
