"""One page with a section of every kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from foldmoe import demo
from foldmoe.cli.main import app
from tests.support.results import eval_result, layer_result, serve_result

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one result file of every kind, written by what writes them, beside logs and raw outputs."""
    folder: Path = tmp_path_factory.mktemp("results")
    layer_result().save(folder / "layer.json")
    layer_result(times=500.0).save(folder / "slow.json")
    serve_result().save(folder / "serve.json")
    eval_result().save(folder / "eval.json")
    plan = ["plan", str(demo.TINY_V4), "--ep", "3", "--device", "h200", "--json"]
    done = CliRunner().invoke(app, plan)
    assert done.exit_code == 0, done.output
    (folder / "plan.json").write_text(done.output)
    (folder / "raw").mkdir()
    (folder / "raw" / "client.json").write_text('{"ttfts": [1]}')
    (folder / "server.log").write_text("started")
    return folder


@pytest.fixture(scope="session")
def page(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("jinja2", reason="foldmoe report needs jinja2: pip install 'foldmoe[report]'")
    out: Path = tmp_path_factory.mktemp("page") / "report.html"
    done = CliRunner().invoke(app, ["report", str(results), "-o", str(out)])
    assert done.exit_code == 0, done.output
    assert "passed over" in done.output
    assert "client.json" in done.output
    return out
