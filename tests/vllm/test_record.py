"""Log lines, agreement and the state file, from layers that were planned without vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import ref

import pytest
import torch

import foldmoe.backends  # noqa: F401  registers the backends that plans ask
from foldmoe.formats import Format
from foldmoe.integrations.vllm.record import Entry, Record
from foldmoe.moe import ExpertSpec, LayerSpec
from foldmoe.parallel import simulate
from foldmoe.parallel.agree import PlanMismatchError, compare
from foldmoe.planner import FusionPolicy, plan_layer

if TYPE_CHECKING:
    from pathlib import Path

    from foldmoe.planner.policy import Fold


def _entry(number: int, fold: Fold = "native", **more: object) -> Entry:
    name = f"model.layers.{number}.mlp.experts"
    spec = LayerSpec(name, 128, 2, ExpertSpec(8, 64, Format.BF16), ExpertSpec(1, 64, Format.BF16))
    return Entry(name, plan_layer(spec, FusionPolicy(fold), "cpu"), loaded=True, **more)  # type: ignore[arg-type]


def _record(*entries: Entry, fold: Fold = "native", folder: Path | None = None) -> Record:
    return Record(FusionPolicy(fold), folder, {"vllm": "0.32.0"}, list(entries))


def test_the_log_counts_layers_and_names_every_refusal() -> None:
    stock = Entry("model.layers.9.mlp.experts", reasons=("LoRA is on", "and biases"), loaded=True)
    record = _record(_entry(1), _entry(2), stock, _entry(3, "slot"))
    assert record.lines() == [
        "foldmoe: folded 3/4 layers (native 2, slot 1), +0 B",
        "foldmoe: model.layers.9.mlp.experts: stock: LoRA is on; and biases",
    ]
    assert record.arm == "mixed"


@pytest.mark.parametrize(
    ("fold", "arm", "run"),
    [("native", "folded", "folded"), ("off", "serial", "serial"), ("dual", "dual-stream", "serial")],
)
def test_the_arm_is_what_the_layers_resolved_to(fold: Fold, arm: str, run: str) -> None:
    """Case 90: a label comes from the layers of the running server, not from what was asked."""
    record = _record(_entry(1, fold), _entry(2, fold), fold=fold)
    assert (record.arm, record.arm_run) == (arm, run)
    assert len(record.lines()) == (1 if fold == "native" else 3)
    record.device = "cuda"
    assert record.arm_run == arm
    assert _record(Entry("a"), Entry("b")).arm == "stock"


def test_case_93_reasons_of_every_unfolded_layer_are_in_the_log() -> None:
    for line in _record(_entry(1, "off"), _entry(2, "dual")).lines()[1:]:
        assert "the policy asks for the shared expert" in line


def test_zeros_in_slots_are_counted_with_the_reason() -> None:
    record = _record(_entry(1, "slot", slot_zeros=1500), _entry(2, "slot", slot_zeros=1500), fold="slot")
    assert "slots hold 3,000 B of zeros" in record.lines()[1]
    assert "as wide as a routed expert" in record.lines()[1]
    assert record.as_dict()["slot_zeros"] == 3000
    assert len(_record(_entry(1, "slot")).lines()) == 1


def test_draft_layers_count_once_they_are_loaded() -> None:
    record = _record(_entry(1))
    assert record.complete
    draft = record.enter(replace(_entry(2), loaded=False))
    assert not record.complete
    draft.loaded = True
    assert record.complete
    assert record.lines() == ["foldmoe: folded 2/2 layers (native 2, slot 0), +0 B, draft layers 1/1"]
    record.enter(Entry("model.layers.3.mlp.experts", reasons=("the experts have biases",)))
    assert [entry.draft for entry in record.entries] == [False, True, True]
    assert record.lines() == [
        "foldmoe: folded 2/3 layers (native 2, slot 0), +0 B, draft layers 1/2",
        "foldmoe: model.layers.3.mlp.experts (draft): stock: the experts have biases",
    ]
    state = record.as_dict()
    assert (state["draft_total"], state["draft_folded"], state["layers_total"]) == (2, 1, 3)
    assert [layer["draft"] for layer in state["layers"]] == [False, True, True]


def test_the_state_file_is_whole_and_says_what_runs(tmp_path: Path) -> None:
    record = _record(_entry(1), folder=tmp_path / "state")
    record.rank, record.kv_blocks = 3, 77
    record.write()
    (file,) = (tmp_path / "state").iterdir()
    assert file.name == "rank-3.json"
    found = json.loads(file.read_text())
    assert found["schema"] == 1
    assert (found["arm"], found["layers_folded"], found["layers_total"], found["kv_blocks"]) == ("folded", 1, 1, 77)
    assert found["asked"]["fold"] == "native"
    assert found["layers"][0]["backend"] == "torch"
    assert found["layers"][0]["digest"]
    _record(_entry(1)).write()  # no folder asked for: nothing to do


def test_ranks_that_decide_differently_stop_with_their_names() -> None:
    ranks = [_record(_entry(1), _entry(2)), _record(_entry(1), Entry(_entry(2).name, reasons=("biases",)))]
    assert ranks[0].digest != ranks[1].digest
    decided = [{entry.name: entry.decision() for entry in record.entries} for record in ranks]
    with pytest.raises(PlanMismatchError, match=r"rank 1 differs from rank 0 in model.layers.2.*'stock'"):
        compare(decided, simulate(2))
    compare(decided[:1] * 2, simulate(2))


def test_layers_of_an_engine_that_is_gone_are_not_counted() -> None:
    """A second engine in one process: its layers are no drafts of the first one's, which nobody holds any more."""
    runner = torch.nn.Module()
    record = _record(_entry(1, owner=ref(runner)), _entry(2, owner=ref(runner)))
    record.begun = 2
    assert record.enter(_entry(3)).draft, "the first engine lives"
    record.entries.pop()
    del runner
    assert not record.enter(_entry(1)).draft
    assert (len(record.entries), record.begun) == (1, 0)
