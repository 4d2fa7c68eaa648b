"""``foldmoe verify`` on checkpoints that are damaged or incomplete: its other layers are verified all the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import foldmoe
from foldmoe import load_layer
from foldmoe.cli.main import app
from foldmoe.verify import passes, verify
from tests.support.checkpoints import changed_copy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.checkpoints import Change

TINY = Path(foldmoe.__file__).parent / "assets" / "tiny-v4"


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "300"})
    return done.exit_code, done.output


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """The shipped checkpoint after ``change(tensors, config)``, in one shard."""

    def make(change: Change, name: str = "changed") -> Path:
        return changed_copy(TINY, tmp_path / name, change)

    return make


def without_second_shard(folder: Path) -> Path:
    """``tiny-v4`` in two shards, of which the second (layers 3 and 4) is not there."""
    folder.mkdir()
    tensors = load_file(TINY / "model.safetensors")
    place = {name: 2 if name.startswith(("layers.3.", "layers.4.")) else 1 for name in tensors}
    save_file({n: t for n, t in tensors.items() if place[n] == 1}, folder / "model-00001-of-00002.safetensors")
    weight_map = {name: f"model-0000{number}-of-00002.safetensors" for name, number in place.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(TINY / "config.json", folder / "config.json")
    return folder


def test_a_checkpoint_without_one_of_its_shards_fails(tmp_path: Path) -> None:
    folder = without_second_shard(tmp_path / "half")
    *layers, three, four, whole = verify(folder, tokens=2)
    assert [(check.layer, check.ok) for check in layers] == [(f"layers.{i}.ffn", True) for i in range(3)]
    for check in (three, four):
        assert "missing: the whole layer" in check.problems[0]
        assert f"(first: {check.layer}." in check.problems[0]
    assert (whole.whole, len(whole.problems)) == (True, 2)
    code, output = run("verify", str(folder), "--tokens", "2")
    assert code == 1
    assert "1 of 2 shards are not there (first: number 2)" in output
    assert "3/5 layers compute what the checkpoint says" in output
    (folder / "model.safetensors.index.json").unlink()
    *_, whole = verify(folder, tokens=2)
    assert whole.problems == ("1 of 2 shards are not there (first: number 2)",)


def test_a_layer_that_lost_its_routed_experts_fails_and_is_planned_as_what_it_is(tiny: Callable[..., Path]) -> None:
    def lose(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith("layers.3.ffn.experts.")]:
            del tensors[name]

    folder = tiny(lose)
    checks = list(verify(folder, tokens=2))
    assert [check.ok for check in checks] == [True, True, True, False, True]
    assert checks[3].problems == ("missing: experts 0-15 of 16 under layers.3.ffn.experts",)
    code, output = run("plan", str(folder), "--device", "cpu")
    assert code == 0
    assert "layers.3.ffn: missing: experts 0-15 of 16" in output
    assert "layers.0..4" not in output

    def more(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith("layers.3.")]:
            del tensors[name]

    code, output = run("plan", str(tiny(more, "more")), "--device", "cpu")
    assert code == 0
    assert "4 of 5 layers" in output


def test_nothing_is_verified_with_no_tokens_and_seeds_have_a_range() -> None:
    for wrong in ({"tokens": 0}, {"tokens": -1}, {"seed": 10**23}, {"seed": -1}):
        with pytest.raises(ValueError, match=r"expected at least 1 token and a seed of 0 to 2\*\*64 - 1"):
            verify(TINY, **wrong)  # type: ignore[arg-type]
        ((option, value),) = wrong.items()
        code, output = run("verify", str(TINY), f"--{option}", str(value))
        assert code == 2
        assert f"'--{option}'" in output
    assert passes(list(verify(TINY, tokens=1, seed=2**64 - 1)))


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("layers.3.ffn.gate.weight", lambda t: t[:, :-1], "gate.weight BF16 [16, 255], expected [16, 256]"),
        ("layers.3.ffn.gate.bias", lambda t: t[:-1], "layers.3.ffn.gate.bias F32 [15], expected [16]"),
        ("layers.0.ffn.gate.tid2eid", lambda t: t.flatten(), "expected I64 [vocabulary, experts a token]"),
        ("layers.0.ffn.gate.tid2eid", lambda t: t.float(), "expected I64 [vocabulary, experts a token]"),
        ("layers.0.ffn.gate.tid2eid", lambda t: t + 1, "tid2eid holds the ids 1 .. 16; the layer's"),
        ("layers.0.ffn.gate.tid2eid", lambda t: t - 1, "tid2eid holds the ids -1 .. 14; the"),
        ("layers.0.ffn.gate.tid2eid", lambda t: t[:0], "tid2eid is empty"),
        ("layers.3.ffn.gate.weight", lambda t: t * float("nan"), "gate.weight: 4096 values are NaN or Inf"),
    ],
)  # fmt: skip
def test_bad_router_tensors_fail_their_own_layer(
    tiny: Callable[..., Path], name: str, change: Callable[[torch.Tensor], torch.Tensor], problem: str
) -> None:
    def spoil(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors[name] = change(tensors[name]).contiguous()
        for other in [n for n in tensors if n.startswith(("layers.1.", "layers.2.", "layers.4."))]:
            del tensors[other]

    good, bad = sorted(verify(tiny(spoil), tokens=2), key=lambda check: not check.ok)
    assert (good.ok, bad.ok, bad.layer) == (True, False, name.partition(".gate.")[0])
    assert any(problem in line for line in bad.problems), bad.problems


def test_damage_is_a_failure_and_foreign_formats_alone_are_skipped(tiny: Callable[..., Path]) -> None:
    def scale(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        tensors["layers.3.ffn.shared_experts.w1.scale"] = torch.zeros(3, 3, dtype=torch.float8_e8m0fnu)

    *_, bad, _ = checks = list(verify(tiny(scale, "scale"), tokens=2))
    assert [check.ok for check in checks] == [True, True, True, False, True]
    assert not bad.skipped
    assert "fit no format of a" in bad.problems[0]
    for name, change in (("top-k", {"num_experts_per_tok": 99}), ("none", {"num_experts_per_tok": None})):
        folder = tiny(lambda tensors, config, change=change: config.update(change), name)
        assert [check.ok for check in verify(folder, tokens=2)] == [True, False, False, False, False]
    (folder / "config.json").unlink()
    assert not passes(list(verify(folder, tokens=2)))

    def integers(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith("layers.3.ffn.experts.") and n.endswith("weight")]:
            tensors[name] = tensors[name].view(torch.int32)

    checks = list(verify(tiny(integers, "integers"), tokens=2))
    assert [check.skipped for check in checks] == [False, False, False, True, False]
    assert passes(checks)

    def both(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        integers(tensors, config)
        del tensors["layers.3.ffn.shared_experts.w2.weight"]

    assert not passes(list(verify(tiny(both, "both"), tokens=2)))


def test_unknown_backends_and_devices_are_said_once() -> None:
    for option, problem in (
        (("--backend", "foo"), "no backend called 'foo'"),
        (("--device", "foo"), "device 'foo' is unknown to torch"),
        (("--device", "h200"), "device 'h200' is a name to plan for"),
    ):
        code, output = run("verify", str(TINY), *option)
        assert code == 2
        assert output.count(problem) == 1
        assert "Traceback" not in output
    with pytest.raises(ValueError, match="device 'h200' is a name to plan for"):
        load_layer(TINY, 1, device="h200")


@pytest.mark.parametrize("scales", ["tensor", "row"])
def test_fp8_of_another_kind_is_skipped_and_no_damage(tiny: Callable[..., Path], scales: str) -> None:
    def coarse(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.startswith("layers.1.ffn.shared_experts.") and n.endswith(".weight")]:
            rows = len(tensors[name])
            tensors[name.replace(".weight", ".scale")] = torch.ones((1,) if scales == "tensor" else (rows, 1))

    code, output = run("verify", str(tiny(coarse)), "--tokens", "2")
    assert (code, "4/5 layers compute what the checkpoint says, 1 skipped" in output) == (0, True), output
