"""A server proves its arm: what every rank says is held against what was asked."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from foldmoe.bench.serve import arms, ranks
from foldmoe.bench.serve.arms import ARMS
from foldmoe.bench.serve.ranks import Rank
from foldmoe.cli.main import app

if TYPE_CHECKING:
    from pathlib import Path

LAYER = "model.layers.1.mlp.experts"


def rank(fold: str, runs: str, **changes: object) -> Rank:
    layers = ({"layer": LAYER, "arm": runs, "reasons": []},)
    made = Rank(0, 1, fold, runs, runs, False, layers, "d", True, 5, 0, 7, {"vllm": "0"})
    return replace(made, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("stock-serial", rank("stock", "stock")),
        ("stock-serial", rank("stock", "stock", stock_shared_stream=None)),  # a device without streams
        ("stock-dual-stream", rank("stock", "stock", stock_shared_stream=True)),
        ("serial", rank("off", "serial")),
        ("dual-stream", rank("dual", "dual-stream")),
        ("folded", rank("native", "folded")),
        ("slot", rank("slot", "folded")),
    ],
)
def test_what_a_server_runs_is_accepted_as_its_arm_alone(name: str, found: Rank) -> None:
    assert ARMS[name].refuted([found]) == ""
    others = [arm for arm in ARMS.values() if arm.name != name]
    if found.stock_shared_stream is not None:
        assert all(arm.refuted([found]) for arm in others)


@pytest.mark.parametrize(
    ("name", "found", "message"),
    [
        ("folded", [], "no rank of the server wrote its state: is foldmoe installed"),
        ("folded", [rank("native", "folded", world_size=2)], "1 ranks wrote their state, they count 2"),
        (
            "folded",
            [rank("native", "folded", world_size=2, rank=r, digest=f"d{r}") for r in range(2)],
            "ranks run different plans: rank 0 d0, rank 1 d1",
        ),
        ("folded", [rank("native", "folded", complete=False)], "rank 0 has not loaded every MoE layer"),
        ("folded", [rank("auto", "folded")], "was asked for fold 'auto', not 'native': does the command line set"),
        (
            "folded",
            [rank("native", "stock", layers=({"layer": LAYER, "arm": "stock", "reasons": [f"{LAYER}: LoRA"]},))],
            f"runs stock, not folded: {LAYER}: LoRA",
        ),
        (
            "dual-stream",
            [rank("dual", "serial", planned="dual-stream")],
            "runs serial, not dual-stream: its device cannot run dual-stream layers",
        ),
        ("stock-dual-stream", [rank("stock", "stock")], "does not use vLLM's stream for shared experts"),
        ("stock-serial", [rank("stock", "stock", stock_shared_stream=True)], "uses vLLM's stream"),
    ],
)
def test_a_server_that_runs_something_else_is_refused_with_what_it_runs(
    name: str, found: list[Rank], message: str
) -> None:
    assert message in ARMS[name].refuted(found)


def test_refused_layers_do_not_refuse_the_arm_but_a_server_without_any_such_layer_is() -> None:
    folded, stock = ({"layer": f"layers.{n}", "arm": arm, "reasons": []} for n, arm in enumerate(("folded", "stock")))
    mixed = rank("native", "mixed", layers=(folded, stock))
    assert ARMS["folded"].refuted([mixed]) == ""
    assert "runs mixed, not folded" in ARMS["folded"].refuted([replace(mixed, layers=(stock, stock))])


def _stages(*digests: str) -> list[Rank]:
    """Two ranks a pipeline stage, each stage with two layers of its own."""
    made = []
    for number, digest in enumerate(digests):
        names = [f"layers.{2 * (number // 2) + n}" for n in range(2)]
        layers = tuple({"layer": name, "arm": "folded", "reasons": []} for name in names)
        made.append(rank("native", "folded", rank=number, world_size=len(digests), digest=digest, layers=layers))
    return made


def test_plans_are_compared_among_ranks_with_the_same_layers() -> None:
    """A digest covers the layers' names: the stages of a pipeline have one each."""
    assert ARMS["folded"].refuted(_stages("a", "a", "b", "b")) == ""
    differing = "ranks run different plans: rank 2 b, rank 3 c"
    assert ARMS["folded"].refuted(_stages("a", "a", "b", "c")) == differing


@pytest.mark.parametrize(("digests", "refused"), [("aabb", False), ("aabc", True)])
def test_eval_compares_the_same_ranks(digests: str, refused: bool, tmp_path: Path) -> None:
    """It reads the state files before it asks the server, which is not there."""
    for stage in _stages(*digests):
        state = {**asdict(stage), "schema": 1, "asked": {"fold": "native"}, "arm": "folded", "arm_run": "folded"}
        (tmp_path / f"rank-{stage.rank}.json").write_text(json.dumps(state))
    words = ["eval", "--server", "native=http://localhost:1/v1", "--state-dir", f"native={tmp_path}"]
    done = CliRunner().invoke(app, [*words, "--tasks", "foldmoe_needle"])
    assert done.exit_code == 2
    assert ("run different plans (rank 2 b, rank 3 c)" in done.output) == refused
    assert ("localhost:1" in done.output) != refused


def test_layers_of_all_stages_are_told_each_once_and_in_order() -> None:
    found = ranks.together(_stages("a", "a", "b", "b"))
    assert [layer["layer"] for layer in found.layers] == ["layers.0", "layers.1", "layers.2", "layers.3"]
    assert found.decisions() == ("MoE layers: 4 folded; runs as folded",)


def test_the_same_reason_of_many_layers_is_one_line() -> None:
    layers = tuple({"layer": f"layers.{n}", "arm": "stock", "reasons": [f"layers.{n}: LoRA"]} for n in range(40))
    assert rank("native", "stock", layers=layers).decisions() == (
        "MoE layers: 40 stock; runs as stock",
        "layers.0 (and 39 more layers): layers.0: LoRA",
    )


def test_state_files_of_another_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    path.write_text(json.dumps({"schema": 2}))
    with pytest.raises(ValueError, match=r"rank-0\.json: expected schema 1, found 2"):
        ranks.read(tmp_path)
    path.write_text(json.dumps({"schema": 1, "rank": 0}))
    with pytest.raises(ValueError, match=r"rank-0\.json lacks 'world_size'"):
        ranks.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("serial,floded", "no arm floded; there are: stock-serial"), ("serial,serial", "an arm is there twice")],
)
def test_unknown_and_repeated_arms_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arms.parse(text)
