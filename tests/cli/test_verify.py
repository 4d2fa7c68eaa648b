"""``foldmoe verify``: passes on every readable family, and fails for any layer that computes something else."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from foldmoe import FoldedMoE, FusionPolicy, load_layer
from foldmoe.checkpoint.config import ModelFacts
from foldmoe.checkpoint.generate import generate, write
from foldmoe.checkpoint.generate.experts import Geometry, MoERecipe, Storage, moe_tensors
from foldmoe.checkpoint.routes import routes
from foldmoe.cli.main import app
from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import ExpertWeights
from foldmoe.verify import EXACT, ON_HOPPER, TOLERANCE, passes, verify

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("v4", "v4.1", "glm-fp8", "qwen", "bf16", "stacked")


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("verify")
    return {kind: generate(kind, root / kind, shards=1) for kind in (*FAMILIES, "kimi-int4")}


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"})
    return done.exit_code, done.output


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_family_passes(kinds: dict[str, Path], kind: str) -> None:
    checks = list(verify(kinds[kind], tokens=4))
    assert passes(checks)
    for check in checks:
        assert check.how == "native on torch"
        assert check.shared is not None
        assert 0 < check.folded < 1e-6
        assert check.tolerance == (EXACT if kind in ("qwen", "bf16", "stacked") else TOLERANCE["fp8"])


def test_bf16_input_is_judged_by_the_tolerances_of_bf16(kinds: dict[str, Path]) -> None:
    (first, *_) = verify(kinds["v4"], tokens=4, dtype=torch.bfloat16)
    assert first.ok
    assert 1e-4 < first.folded < TOLERANCE["fp8"]


def test_hopper_is_held_to_what_its_tensor_cores_keep(kinds: dict[str, Path]) -> None:
    def load(path: Any, name: str, **how: Any) -> FoldedMoE:
        layer = load_layer(path, name, **how)
        layer.plan = replace(layer.plan, backend="hopper")
        return layer

    (first, *_) = verify(kinds["v4"], tokens=4, load=load)
    assert first.tolerance == ON_HOPPER["fp8"]
    assert first.how == "native on hopper"


def scaled(layer: FoldedMoE, factor: float) -> FoldedMoE:
    """``layer`` with its shared expert's down projection scaled, in the packed weights alone."""
    routed, shared = layer.unpack()
    assert shared is not None
    down = QuantizedTensor(shared.down.dequantize(torch.bfloat16) * factor, format=Format.BF16)
    gate_up = QuantizedTensor(shared.gate_up.dequantize(torch.bfloat16), format=Format.BF16)
    spec = layer.plan.spec
    assert spec.shared is not None
    plan = replace(layer.plan, spec=replace(spec, shared=replace(spec.shared, format=Format.BF16)))
    return FoldedMoE(routed, ExpertWeights(gate_up, down), activation=spec.activation, plan=plan)


def test_case_1_a_shared_expert_off_by_four_tenths_fails(kinds: dict[str, Path]) -> None:
    def load(path: Any, layer: str, **how: Any) -> FoldedMoE:
        return scaled(load_layer(path, layer, **how), 0.4 if layer == "layers.3.ffn" else 1.0)

    checks = {check.layer: check for check in verify(kinds["v4"], tokens=4, load=load)}
    bad = checks.pop("layers.3.ffn")
    assert not bad.ok
    assert bad.shared == pytest.approx(0.6, abs=0.01)
    assert any(problem.startswith("folded: relative error") for problem in bad.problems)
    assert any(problem.startswith("the shared expert alone: relative error 6.0") for problem in bad.problems)
    # The others are right but were repacked in another format, which is said too.
    assert all(check.folded < 1e-6 for check in checks.values())
    assert all("do not unpack to the stored bytes" in check.problems[0] for check in checks.values())


def test_one_wrong_code_in_the_packed_weights_fails(kinds: dict[str, Path]) -> None:
    def load(path: Any, layer: str, **how: Any) -> FoldedMoE:
        moe = load_layer(path, layer, **how)
        moe.unpack()[0].down.values.view(torch.uint8)[2, 5, 7] ^= 0x10
        return moe

    (first, *_) = verify(kinds["stacked"], tokens=64, load=load)
    assert any("the routed experts (native) do not unpack" in problem for problem in first.problems)
    assert any(problem.startswith("folded: relative error") for problem in first.problems)


def test_a_nan_is_a_failure_of_its_layer_not_of_the_run(kinds: dict[str, Path], tmp_path: Path) -> None:
    tensors = load_file(kinds["v4"] / "model.safetensors")
    tensors["layers.2.ffn.shared_experts.w1.weight"].view(torch.uint8)[0, 0] = 0x7F
    del tensors["layers.4.ffn.gate.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((kinds["v4"] / "config.json").read_text())
    checks = list(verify(tmp_path, tokens=2))
    assert [check.ok for check in checks] == [True, True, False, True, False]
    assert "shared_experts.w1.weight: 1 NaN" in checks[2].problems[0]
    assert "gate.weight" in checks[4].problems[0]
    code, output = run("verify", str(tmp_path), "--tokens", "2")
    assert code == 1
    assert "FAILS" in output
    assert "3/5 layers compute what the checkpoint says" in output


def test_missing_tensors_fail_and_unknown_formats_are_skipped(kinds: dict[str, Path], tmp_path: Path) -> None:
    (check,) = verify(kinds["kimi-int4"])
    assert check.skipped
    assert not passes([check])
    code, output = run("verify", str(kinds["kimi-int4"]))
    assert code == 1
    assert "skipped" in output
    tensors = load_file(kinds["bf16"] / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((kinds["bf16"] / "config.json").read_text())
    first, second = verify(tmp_path)
    assert first.problems == ("missing: model.layers.1.mlp.experts.3.up_proj.weight",)
    assert second.ok


def test_the_slot_fold_is_verified_against_the_requantised_shared_expert(kinds: dict[str, Path]) -> None:
    policy = FusionPolicy(fold="slot", allow_requantize=True)
    (first, *_) = verify(kinds["v4"], policy=policy, tokens=4)
    assert first.ok
    assert first.how == "slot on torch"
    assert first.requantized
    assert first.agreement is not None
    assert 0.02 < first.agreement < 0.3, "against the unfolded run it shows what requantising costs, and fails nobody"


def test_a_fold_that_was_asked_for_and_refused_is_no_success(kinds: dict[str, Path]) -> None:
    first, *_ = checks = list(verify(kinds["v4"], policy=FusionPolicy("slot"), tokens=2))
    assert (first.ok, first.folds, first.how) == (True, False, "serial on torch")
    assert "slot: " in first.refused
    assert not passes(checks)
    code, output = run("verify", str(kinds["v4"]), "--tokens", "2", "--fold", "slot")
    assert code == 1
    assert "layers.0.ffn: the fold that was asked for was not run: " in output
    assert "5 not folded as asked" in output
    row = next(line for line in output.splitlines() if "layers.0.ffn │" in line)
    assert [cell.strip() for cell in row.split("│")][3] == "", "no folded run, no figure of one"
    assert passes(list(verify(kinds["v4"], policy=FusionPolicy("off"), tokens=2))), "what was asked for was run"


def test_the_original_is_looked_for_before_layers_are_run(
    kinds: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foldmoe.verify._check", lambda *_: pytest.fail("ran a layer"))
    code, output = run("verify", str(kinds["v4"]), "--against", "nothing")
    assert code == 2
    assert "nothing: no such folder or file" in output


def test_a_narrower_shared_expert_in_a_slot_is_verified_too(tmp_path: Path) -> None:
    storage = Storage(Format.MXFP4)
    recipe = MoERecipe(Geometry(128, 96, 4, 2, shared_width=64), storage, storage)
    named = moe_tensors("model.layers.0.mlp", recipe, torch.Generator().manual_seed(0))
    folder = write(tmp_path / "x", {"num_experts_per_tok": 2}, named)
    (check,) = verify(folder, policy=FusionPolicy(fold="slot"), tokens=4)
    assert check.problems == ()
    assert check.how == "slot on torch"


def test_the_command_prints_a_row_a_layer_and_exits_zero(kinds: dict[str, Path]) -> None:
    code, output = run("verify", str(kinds["bf16"]), "--tokens", "2", "--against", str(kinds["bf16"]))
    assert code == 0
    assert "2/2 layers compute what the checkpoint says" in output
    assert "2/2 layers match the original" in output


def test_a_derived_checkpoint_with_a_scaled_shared_expert_fails_against_its_original(
    kinds: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(kinds["bf16"] / "model.safetensors")
    tensors["model.layers.2.mlp.shared_experts.down_proj.weight"] *= 0.4
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((kinds["bf16"] / "config.json").read_text())
    code, output = run("verify", str(tmp_path), "--tokens", "2", "--against", str(kinds["bf16"]))
    assert code == 1
    assert "gain 0.400" in output
    assert "1/2 layers match the original" in output


def test_requantize_prints_what_it_cost_and_its_result_verifies(kinds: dict[str, Path], tmp_path: Path) -> None:
    code, output = run("requantize", str(kinds["v4.1"]), str(tmp_path / "out"))
    assert code == 0
    assert "3 shared experts are mxfp4 now, RMS up to 0.1" in output
    assert "on a Hopper GPU run this copy with --fold slot" in output
    code, output = run("verify", str(tmp_path / "out"), "--tokens", "2", "--against", str(kinds["v4.1"]))
    assert code == 0
    assert "requantised" in output
    code, output = run("requantize", str(kinds["v4.1"]), str(tmp_path / "out"))
    assert code == 2
    assert "exists and is not empty" in output


def test_routes_are_the_models_own(kinds: dict[str, Path]) -> None:
    random = torch.Generator().manual_seed(0)
    x, router = torch.randn(5, 16), {"weight": torch.randn(8, 16), "bias": torch.zeros(8)}
    facts = ModelFacts.of(json.loads((kinds["glm-fp8"] / "config.json").read_text()))
    ids, weights = routes(x, router, 2, facts, random)
    scores = (x @ router["weight"].T).sigmoid()
    assert torch.equal(ids, scores.topk(2).indices)
    assert torch.allclose(weights.sum(-1), torch.full((5,), 2.5))
    table = torch.randint(0, 8, (32, 3))
    ids, _ = routes(x, {**router, "table": table}, 3, replace(facts, scoring="sqrtsoftplus"), random)
    assert all(row.tolist() in table.tolist() for row in ids)
    _, weights = routes(x, {"weight": router["weight"]}, 8, ModelFacts(), random)
    assert torch.allclose(weights.sum(-1), torch.ones(5))
