"""The page's text: what it says, what it refuses, and that nothing of it lies elsewhere."""

from __future__ import annotations

import builtins
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from foldmoe import demo, result_file
from foldmoe.cli.main import app
from foldmoe.report.page.layer import layer_section
from foldmoe.report.page.plan import PlanFile, plan_section
from foldmoe.report.page.sources import sections
from tests.support.results import eval_result, layer_result, serve_result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_VOID = {"meta", "link", "br", "img", "input", "hr"}


class _Checked(HTMLParser):
    """Every element is closed where it was opened; ids are unique; references lead somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.named: list[str] = []
        self.tags: set[str] = set()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        found = {name: value or "" for name, value in attrs}
        self.ids += [found["id"]] if "id" in found else []
        self.named += found.get("aria-labelledby", "").split()
        self.addresses += [value for name, value in found.items() if name in ("href", "src", "srcset", "action")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _checked(page: Path) -> _Checked:
    found = _Checked()
    found.feed(page.read_text())
    return found


def test_the_page_is_well_formed_and_names_lead_somewhere(page: Path) -> None:
    found = _checked(page)
    assert found.open == []
    assert len(set(found.ids)) == len(found.ids)
    assert set(found.named) <= set(found.ids)
    assert {address[1:] for address in found.addresses if address.startswith("#")} <= set(found.ids)


def test_nothing_of_the_page_lies_elsewhere(page: Path) -> None:
    found = _checked(page)
    assert not found.tags & {"script", "iframe", "object", "embed"}
    assert all(address.startswith(("#", "data:")) for address in found.addresses)
    assert not re.search(r"url\(|@import", page.read_text())


def test_every_kind_has_its_section(page: Path) -> None:
    text = page.read_text()
    titles = re.findall(r"<h2[^>]*>([^<]+)</h2>", text)
    assert [title.split()[0].rstrip(":") for title in titles] == ["Plan", "Layer", "Layer", "Serving", "Accuracy"]
    for words in (
        "0: 6 experts",
        "milliseconds",
        "ours folded against ours serial, output tokens a second: better in 2 of 2 workloads.",
        "slot against serial: worse.",
        "ceilings in this run: 4,620 GB/s read",
        "not run: transformers: Transformers&#39; own experts are compared on bf16 weights",
        "foldmoe bench layer --shape A --tokens 1,8,32,128,512,2048 --backend hopper",
        "INCOMPLETE",
    ):
        assert words in text, words


def test_what_files_say_is_text_never_markup(page: Path) -> None:
    assert "port &lt;8000&gt; is taken" in page.read_text()


def test_the_same_results_make_the_same_page(page: Path, results: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.html"
    CliRunner().invoke(app, ["report", str(results), "-o", str(again)])
    assert again.read_text() == page.read_text()


def _report(*paths: Path, out: Path) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["report", *map(str, paths), "-o", str(out)])
    return done.exit_code, done.output


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.json", {"kind": "bench-bananas"}, "holds 'bench-bananas', which this foldmoe cannot show; it knows plan"),
        ("x.json", {"rows": []}, "no result file: it should be a JSON object with a 'kind'"),
        ("x.json", {"kind": "bench-layer"}, "no 'request'"),
        ("x.json", {"kind": "plan"}, "no 'source'"),
        ("folder", None, "no result files: write some with"),
        ("missing.json", None, "missing.json"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(
    tmp_path: Path, name: str, content: dict[str, Any] | None, message: str
) -> None:
    path, out = tmp_path / name, tmp_path / "r.html"
    if content is not None:
        path.write_text(json.dumps(content))
    elif name == "folder":
        path.mkdir()
    status, output = _report(path, out=out)
    assert status == 2
    assert message in " ".join(output.split())
    assert not out.exists()


def test_an_unknown_kind_in_a_folder_is_passed_over_with_the_reason(tmp_path: Path) -> None:
    layer_result().save(tmp_path / "a.json")
    (tmp_path / "b.json").write_text('{"kind": "bench-bananas"}')
    found, passed_over = sections([tmp_path])
    assert len(found) == 1
    assert list(passed_over) == [tmp_path / "b.json"]
    assert "b.json holds 'bench-bananas', which this foldmoe cannot show" in passed_over[tmp_path / "b.json"]


def test_a_page_finds_its_folder_made(results: Path, tmp_path: Path) -> None:
    pytest.importorskip("jinja2", reason="foldmoe report needs jinja2: pip install 'foldmoe[report]'")
    out = tmp_path / "new" / "sub" / "r.html"
    status, output = _report(results, out=out)
    assert status == 0, output
    assert out.exists()


@pytest.mark.parametrize("kind", ["layer", "serve", "eval"])
def test_a_nan_stands_in_the_tables_and_not_on_the_charts(tmp_path: Path, kind: str) -> None:
    nan = float("nan")
    if kind == "layer":
        layer = layer_result()
        layer.rows[0] = replace(layer.rows[0], seconds=nan)
        layer.save(tmp_path / "r.json")
    elif kind == "serve":
        served = serve_result()
        served.runs[:] = [
            replace(run, metrics=run.metrics | {"mean_tpot_ms": nan}) if run.arm == "slot" else run
            for run in served.runs
        ]
        served.save(tmp_path / "r.json")
    else:
        asked = eval_result(items=4)
        arm = asked.arms[0]
        samples = tuple(replace(sample, scores={"exact": nan}) for sample in arm.tasks["needle"].samples)
        arm.tasks["needle"] = replace(arm.tasks["needle"], samples=samples)
        asked.save(tmp_path / "r.json")
    (section,), _ = sections([tmp_path / "r.json"])
    charts = [chart for block in section.blocks if block.kind == "charts" for chart in block.charts]
    assert charts
    for chart in charts:
        assert "nan" not in f"{chart.drawn()} {chart.x_ticks()} {chart.text}"
    cells = " ".join(cell for block in section.blocks if block.kind == "table" for row in block.rows for cell in row)
    assert "nan" in cells
    assert not any("nan" in line for line in section.lead)


def test_what_is_wrong_with_a_result_names_its_file(tmp_path: Path) -> None:
    result = layer_result()
    result.rows[0] = replace(result.rows[0], floor=0.0)
    result.save(tmp_path / "r.json")
    with pytest.raises(ValueError, match=r"r\.json: float division by zero"):
        sections([tmp_path / "r.json"])


def test_a_result_of_a_newer_version_does_not_keep_a_folder_from_its_page(tmp_path: Path) -> None:
    layer_result().save(tmp_path / "a.json")
    newer = tmp_path / "b.json"
    newer.write_text(json.dumps(json.loads((tmp_path / "a.json").read_text()) | {"surprise": 1}))
    found, passed_over = sections([tmp_path])
    assert len(found) == 1
    assert passed_over == {newer: f"{newer}: unknown surprise; was it written by a newer foldmoe?"}
    with pytest.raises(ValueError, match="unknown surprise"):
        sections([newer])
    (tmp_path / "a.json").unlink()
    with pytest.raises(ValueError, match=r"no result files: .*; passed over: .*b\.json: unknown surprise"):
        sections([tmp_path])


def test_without_jinja2_the_message_names_the_extra(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jinja2":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    status, output = _report(results, out=tmp_path / "r.html")
    assert status == 2
    assert "pip install 'foldmoe[report]'" in output


def test_where_folding_wins_ties_and_loses_is_said() -> None:
    result = layer_result(tokens=(1, 8))
    slow = replace(
        result, rows=[replace(r, seconds=r.seconds * 2) if r.arm.endswith("folded") else r for r in result.rows]
    )
    assert "Folded is slower at these numbers of tokens: 1 (+100.0%" in " ".join(layer_section(slow, "f").lead)
    said = " ".join(layer_section(result, "f").lead)
    assert "Folded ties within the noise at these numbers of tokens: 1 (+0.0% against hopper dual-stream), 8" in said
    assert "faster" not in said
    few = " ".join(layer_section(layer_result(rounds=2), "f").lead)
    assert "With 2 rounds the noise is not known" in few


def test_the_worst_error_is_our_own_and_nan_is_the_worst() -> None:
    result = layer_result(tokens=(1,))
    peer = replace(result.rows[0], arm="humming serial", error=4e-2)
    with_peer = replace(result, request=replace(result.request, peers=("humming",)), rows=[*result.rows, peer])
    assert "5.0e-03" in layer_section(with_peer, "f").lead[-1]
    broken = replace(result, rows=[*result.rows, replace(result.rows[0], arm="hopper serial", error=float("nan"))])
    assert "nan (hopper serial, tokens: 1)" in layer_section(broken, "f").lead[-1]


def test_a_layer_without_rows_or_without_tokens_has_no_charts() -> None:
    result = layer_result()
    for rows in ([], [replace(result.rows[0], tokens=0)]):
        section = layer_section(replace(result, rows=rows), "f")
        assert [block.kind for block in section.blocks] == ["table", "notes", "source"]


def _plan(tmp_path: Path, *options: str) -> PlanFile:
    done = CliRunner().invoke(app, ["plan", str(demo.TINY_V4), "--json", *options])
    assert done.exit_code == 0, done.output
    (tmp_path / "plan.json").write_text(done.output)
    return PlanFile.load(tmp_path / "plan.json")


def _first_row(plan: PlanFile) -> dict[str, str]:
    table = plan_section(plan, "plan.json").blocks[0]
    assert table.kind == "table"
    return dict(zip(table.headings, table.rows[0], strict=True))


def test_a_plan_shows_layers_ranks_and_the_reason(tmp_path: Path) -> None:
    row = _first_row(_plan(tmp_path, "--ep", "3", "--device", "cpu", "--fold", "off"))
    assert row["layers"] == "layers.0..4.ffn (5 layers)"
    assert row["runs"].startswith("unfolded, serial on torch")
    assert row["expert-parallel ranks"] == "0: 6 experts; 1 to 2: 5 experts each"
    assert "the policy asks for the shared expert" in row["why not better, and notes"]


def test_a_plan_says_when_the_engine_keeps_the_layer(tmp_path: Path) -> None:
    assert (
        _first_row(_plan(tmp_path, "--fold", "stock", "--device", "cpu"))["runs"] == "unfolded: the engine's own layer"
    )


def test_a_plan_keeps_the_command_that_makes_it_again(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "--ep", "2", "--device", "cpu", "--fold", "slot", "--allow-requantize")
    again = CliRunner().invoke(app, plan.command.split()[1:])
    assert again.exit_code == 0, again.output
    assert json.loads(again.output) == json.loads((tmp_path / "plan.json").read_text())
    assert "--allow-requantize" in plan.command


def test_a_served_arm_without_a_valid_run_stays_in_the_tables(tmp_path: Path) -> None:
    result = serve_result()
    result.runs = [run for run in result.runs if run.arm != "folded"]
    result.save(tmp_path / "serve.json")
    (section,), _ = sections([tmp_path / "serve.json"])
    assert "ours folded against ours serial, output tokens a second: none valid in 2 of 2 workloads." in section.lead
    cells = [row for block in section.blocks if block.kind == "table" for row in block.rows if "ours folded" in row]
    assert any("no valid run" in row for row in cells)
    assert any("none" in row for row in cells)


def test_a_file_that_was_named_twice_is_shown_once(tmp_path: Path) -> None:
    result_file.save(tmp_path / "l.json", "bench-layer", layer_result())
    found, passed_over = sections([tmp_path / "l.json", tmp_path / "l.json"])
    assert (len(found), passed_over) == (1, {})


def test_runs_of_one_layer_are_told_apart(tmp_path: Path) -> None:
    for name in ("b.json", "one/a.json", "two/a.json"):
        layer_result().save(tmp_path / name)
    title = layer_section(layer_result(), "").title
    found, _ = sections([tmp_path])
    assert [section.title for section in found] == [
        f"{title}, {name}" for name in ("b.json", "one/a.json", "two/a.json")
    ]
    (alone,), _ = sections([tmp_path / "b.json"])
    assert alone.title == title
