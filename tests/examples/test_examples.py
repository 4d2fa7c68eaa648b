"""Every example runs and says what its page promises; the backend of one's own survives what every backend must."""

from __future__ import annotations

import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from foldmoe import FoldedMoE, Format, FusionPolicy, reference_moe
from foldmoe.demo import TINY_V4
from foldmoe.planner import capability
from tests.support.cases import CASE_NAMES, FLOAT32_TOLERANCE, assert_close, get_case, make_layer

EXAMPLES = Path(__file__).parents[2] / "examples"
TESTED = {"fold_by_hand", "plan_hub_checkpoint", "compare_arms", "custom_backend"}


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
