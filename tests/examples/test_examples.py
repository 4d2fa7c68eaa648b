"""Every example runs and says what its page promises; the backend of one's own survives what every backend must."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from foldmoe import FoldedMoE, Format, FusionPolicy, reference_moe
from foldmoe.demo import TINY_V4
from foldmoe.planner import capability
from tests.support.cases import CASE_NAMES, FLOAT32_TOLERANCE, assert_close, get_case, make_layer

EXAMPLES = Path(__file__).parents[2] / "examples"
TESTED = {
    "compare_arms", "custom_backend", "fold_by_hand", "forking_client", "plan_hub_checkpoint", "v4_flash_folder",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _backends_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capability, "_REGISTRY", dict(capability._REGISTRY))


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def test_no_example_is_left_untested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == TESTED


def test_fold_by_hand(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "fold_by_hand")
    said = capsys.readouterr().out
    assert "native on" in said
    found = re.search(r"relative error (\S+),", said)
    assert found is not None
    assert float(found[1]) <= 6e-3


def test_plan_a_checkpoint_from_its_headers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "plan_hub_checkpoint", str(TINY_V4), "--ep", "2", "--device", "b200")
    said = capsys.readouterr().out
    assert "5/5 layers fold natively" in said
    assert said.count("    hopper: ") == 5  # its reason, under every layer


@pytest.mark.skipif(os.environ.get("HUB_TESTS") != "1", reason="asks the Hugging Face hub; run with HUB_TESTS=1")
def test_plan_a_hub_repository(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "plan_hub_checkpoint", "deepseek-ai/DeepSeek-V3", "--ep", "8", "--device", "h200")
    assert "layers fold natively" in capsys.readouterr().out


def test_a_repository_that_cannot_be_read_ends_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot be planned"):
        run(monkeypatch, "plan_hub_checkpoint", str(tmp_path))


def test_comparing_arms_needs_a_gpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU is visible to torch"):
        run(monkeypatch, "compare_arms")


@pytest.mark.gpu
def test_compare_arms(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "compare_arms", "--shape", "cpu-v4", "--tokens", "1,16", "--rounds", "4", "--backend", "triton")
    said = capsys.readouterr().out
    assert said.count("fastest") == 2
    assert all(said.count(f"triton {arm}") == 2 for arm in ("serial", "dual-stream", "folded"))


def test_custom_backend(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "custom_backend")
    said = capsys.readouterr().out
    assert "native on dense" in said
    assert float(said.split("error ")[1]) <= FLOAT32_TOLERANCE


@pytest.fixture
def _dense() -> None:
    runpy.run_path(str(EXAMPLES / "custom_backend.py"))


@pytest.mark.usefixtures("_dense")
@pytest.mark.parametrize("fold", ["native", "off"])
@pytest.mark.parametrize("name", CASE_NAMES)
def test_custom_backend_survives_every_shared_case(name: str, fold: str) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.FP8_32x32, experts=8, width=64, shared_width=96, hidden=128)
    policy = FusionPolicy(fold, activations="bf16", backend="dense")  # type: ignore[arg-type]
    layer = FoldedMoE(routed, shared, policy=policy)
    case = get_case(name, 9, 3, 8, 128)
    x = case.x.float()
    y = layer(x, case.topk_ids, case.topk_weights, **case.kwargs)
    assert_close(
        y, reference_moe(x, case.topk_ids, case.topk_weights, routed, shared, **case.kwargs), FLOAT32_TOLERANCE
    )


@pytest.mark.usefixtures("_dense")
def test_custom_backend_gives_the_stored_bits_back_and_refuses_by_reason() -> None:
    routed, shared = make_layer(Format.MXFP4, Format.FP8_32x32, experts=4, width=64, shared_width=64, hidden=64)
    layer = FoldedMoE(routed, shared, policy=FusionPolicy("native", activations="bf16", backend="dense"))
    back = layer.unpack()[0]
    assert back.gate_up.values.equal(routed.gate_up.values)
    with pytest.raises(ValueError, match="dense: activations fp8: this example quantises none"):
        FoldedMoE(routed, shared, policy=FusionPolicy("native", activations="fp8", backend="dense"))


def test_v4_flash_without_its_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sizes are those that Transformers takes V4-Flash to have; prompts of random tokens survive being text."""
    transformers = pytest.importorskip("transformers.models.deepseek_v4")
    from transformers import AutoConfig, AutoTokenizer

    run(monkeypatch, "v4_flash_folder", str(tmp_path), "--layers", "6")
    found, published = AutoConfig.from_pretrained(tmp_path), transformers.DeepseekV4Config()
    names = """vocab_size hidden_size moe_intermediate_size num_attention_heads num_key_value_heads head_dim q_lora_rank
        o_groups o_lora_rank num_experts_per_tok n_routed_experts n_shared_experts scoring_func norm_topk_prob
        routed_scaling_factor max_position_embeddings hc_mult swiglu_limit sliding_window index_n_heads index_head_dim
        index_topk qk_rope_head_dim"""
    for name in names.split():
        assert getattr(found, name) == getattr(published, name), name
    sparse, dense = "compressed_sparse_attention", "heavily_compressed_attention"
    assert found.layer_types == ["sliding_attention"] * 2 + [sparse, dense] * 2
    tokenizer, tokens = AutoTokenizer.from_pretrained(tmp_path), [129279, 3, 4711, 65536]
    assert tokenizer(tokenizer.decode(tokens))["input_ids"] == tokens
    longest = max(map(len, tokenizer.get_vocab()))
    assert len(tokenizer.decode([129279] * 100)) <= 100 * longest  # vLLM refuses prompts of more characters
    with pytest.raises(SystemExit, match="1 to 43"):
        run(monkeypatch, "v4_flash_folder", str(tmp_path), "--layers", "44")


_VLLM = {  # what the client takes of vLLM; its benchmark is done when it printed its arguments
    "vllm/benchmarks/datasets.py": "",
    "vllm/benchmarks/serve.py": "",
    "vllm/tokenizers.py": "def get_tokenizer(): ...",
    "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser",
    "vllm/entrypoints/cli/benchmark/serve.py": """
import os, sys
class BenchmarkServingSubcommand:
    def add_cli_args(parser): parser.add_argument("--port", type=int)
    def cmd(args):
        print("port", args.port, os.getcwd(), os.environ["WHO"])
        if args.port == 1: raise RuntimeError("no server there")
""",
}


def test_a_client_that_forks(tmp_path: Path) -> None:
    for name, text in _VLLM.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    script, door = str(EXAMPLES / "forking_client.py"), tmp_path / "door"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    server = subprocess.Popen([sys.executable, script, "--listen", str(door)], env=environment, stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        assert b"listening" in server.stdout.readline()

        def client(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-S", "-E", script, "--socket", str(door), *arguments]
            mine = {**environment, "WHO": "me"}
            return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=mine, check=False)

        well, failed, misspelt = client("--port", "8000"), client("--port", "1"), client("--prot", "x")
    finally:
        server.kill()
        server.wait()
    assert (well.returncode, well.stdout) == (0, f"port 8000 {tmp_path} me\n")
    assert failed.returncode == 1
    assert "no server there" in failed.stderr
    assert misspelt.returncode == 2
    assert "--prot" in misspelt.stderr
    nobody = client("--port", "8000")
    assert nobody.returncode == 1
    assert "Error" in nobody.stderr
