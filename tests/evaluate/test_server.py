"""What a server says about itself, and what is no such server. Needs no lm-eval."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from foldmoe.cli.main import app
from foldmoe.evaluate import harness, server
from tests.evaluate.serving import serve


def test_a_server_gives_its_model_and_version() -> None:
    with serve(lambda body: ("", "stop")) as url:
        assert server.describe("native", url + "/") == {"url": url, "model": "tiny", "version": "9.9"}


def test_only_some_servers_have_a_version() -> None:
    with serve(lambda body: ("", "stop"), version=None) as url:
        assert server.describe("native", url) == {"url": url, "model": "tiny"}


def test_a_server_that_is_not_there_is_an_error_with_the_arm_and_the_url() -> None:
    with serve(lambda body: ("", "stop")) as url:
        pass  # gone
    words = ["eval", "--server", f"native={url}", "--tasks", "foldmoe_needle"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert f"arm native: {url}/models gave no model name" in done.output


def test_a_url_that_is_no_base_url_is_an_error() -> None:
    with serve(lambda body: ("", "stop")) as url, pytest.raises(ValueError, match="expected the base URL"):
        server.describe("native", url.removesuffix("/v1"))


def test_without_lm_eval_its_tasks_are_refused_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ValueError, match=r"pip install 'foldmoe\[eval\]'"):
        harness.require()


@pytest.mark.parametrize("option", ["native", "native=", "=x"])
def test_a_server_option_is_arm_and_url(option: str) -> None:
    done = CliRunner().invoke(app, ["eval", "--server", option])
    assert done.exit_code == 2
    assert "--server takes ARM=VALUE" in done.output


def test_a_state_dir_where_no_rank_wrote_is_an_error() -> None:
    words = ["eval", "--server", "native=http://localhost:1/v1", "--state-dir", "native=nowhere"]
    done = CliRunner().invoke(app, [*words, "--tasks", "foldmoe_needle"])
    assert done.exit_code == 2
    assert "arm native: no rank wrote to nowhere" in done.output
