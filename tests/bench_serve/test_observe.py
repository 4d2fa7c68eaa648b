"""Lines as vLLM 0.32 prints them, and pages as its metrics endpoint serves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from foldmoe.bench.serve import observe
from foldmoe.bench.serve.server import command_line

if TYPE_CHECKING:
    from pathlib import Path

PAGE = """# HELP vllm:prefix_cache_queries_total Prefix cache queries, in terms of number of queried tokens.
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 1000.0
vllm:prefix_cache_queries_total{engine="1",model_name="m"} 1000.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 400.0
vllm:prefix_cache_hits_total{engine="1",model_name="m"} 0.0
vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="900"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="880"} 1.0
"""


def test_kv_blocks_are_the_fewest_of_all_engines() -> None:
    assert observe.kv_blocks(PAGE) == 880
    assert observe.kv_blocks("") is None


def test_the_prefix_caches_share_is_of_what_was_asked_between_two_pages() -> None:
    later = PAGE.replace(" 1000.0", " 1500.0").replace(" 400.0", " 600.0")
    assert observe.hit_share(PAGE, later) == pytest.approx(0.2)
    assert observe.hit_share(PAGE, PAGE) is None
    assert observe.hit_share(None, later) is None
    assert observe.hit_share("", later) is None


def test_kernels_compiled_while_requests_are_served_are_named_once() -> None:
    text = "".join(
        f"(Worker pid=1) WARNING 11-29 18:00:00 [jit_monitor.py:140] {what} during inference: {kernel}. This causes a "
        "latency spike; consider extending warmup to cover this shape/config.\n"
        for what, kernel in (
            ("Triton kernel JIT compilation", "_combine"),
            ("TileLang JIT compilation", "mhc_pre (64x64)"),
            ("Triton kernel JIT compilation", "_combine"),
        )
    )
    own = "2026-11-29 18:00:00  [TileLang:tilelang.jit.kernel:INFO] (kernel.py:133): TileLang begins to compile kernel "
    ended = "[TileLang:tilelang.jit.kernel:INFO] (kernel.py:141): TileLang completes to compile kernel `mhc_fused`\n"
    text += f"{own}`mhc_fused` with `out_idx=None`\n{ended}"  # vLLM 0.25.1 says nothing of these
    assert observe.compiled(text) == ("_combine", "mhc_pre", "mhc_fused")
    assert observe.compiled("INFO Capturing graphs took 3 s") == ()


def test_the_largest_ranks_weights_are_taken() -> None:
    text = "INFO Model loading took 41.47 GiB memory and 9.0 seconds\nINFO Model loading took 43.34 GiB memory and 9.1"
    assert observe.weights_bytes(text) == round(43.34 * 2**30)
    assert observe.weights_bytes("nothing") is None


@pytest.mark.parametrize("found", ["/c/E=385,N=2048.json", "['/c/E=385,N=2048.json']"])
def test_missing_and_found_tables_of_tuned_kernels_are_lines(found: str) -> None:
    text = (
        f"WARNING Using default MoE config. Performance might be sub-optimal! Config file not found at {found}\n"
        "INFO Using configuration from /c/N=4096.json for W8A8 Block FP8 kernel.\n"
    )
    assert observe.tuned_tables(text) == (
        "no tuned table, generic kernel settings: /c/E=385,N=2048.json",
        "tuned table: /c/N=4096.json",
    )


def test_a_log_is_read_on_from_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("one\n")
    log = observe.Log(path)
    assert log.new() == "one\n"
    with path.open("a") as file:
        file.write("two\n")
    assert (log.new(), log.new()) == ("two\n", "")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("vllm serve 'a b'", ["vllm", "serve", "a b", "--port", "81"]),
        ("serve -p {port}", ["serve", "-p", "81"]),
        ("serve --url=http://here:{port}/", ["serve", "--url=http://here:81/"]),
        ("serve --port 81", ["serve", "--port", "81"]),
        ("serve --port=81 --x", ["serve", "--port=81", "--x"]),
    ],
)
def test_any_command_line_is_told_the_port_once(command: str, words: list[str]) -> None:
    assert command_line(command, 81) == words


@pytest.mark.parametrize(
    ("command", "message"),
    [("", "the server's command line is empty"), ("serve --port 80", "says --port 80, the benchmark uses 81")],
)
def test_a_command_line_without_a_program_or_with_another_port_is_refused(command: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command_line(command, 81)
