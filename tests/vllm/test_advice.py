"""``foldmoe doctor``: is the plugin active, and what would a ``vllm serve`` command have to change."""

from __future__ import annotations

import shlex

import pytest
from typer.testing import CliRunner

from foldmoe.cli.main import app
from foldmoe.evaluate.skills import TINY_V4
from foldmoe.integrations.vllm import advice, plugin, versions
from foldmoe.integrations.vllm.deployments import DEPLOYMENTS
from foldmoe.planner import FusionPolicy


def _advise(words: str) -> dict[str, advice.Advice]:
    return {line.subject: line for line in advice.command(shlex.split(f"vllm serve {words}"), FusionPolicy())}


def test_a_command_with_nothing_against_it() -> None:
    lines = _advise("some/Model")
    assert lines["command"].ok
    assert not lines["checkpoint"].ok
    assert lines["checkpoint"].found.startswith("was not read")
    assert "'foldmoe plan some/Model'" in lines["checkpoint"].what_to_do
    plan = _advise(f"{TINY_V4} --enable-expert-parallel -tp 2 --max-model-len=512")["checkpoint"]
    assert (plan.found, plan.ok) == ("5/5 layers fold natively, +0 B", True)


@pytest.mark.parametrize(
    ("words", "subject", "change"),
    [
        ("m --enable-eplb", "--enable-eplb", "leave it out"),
        ("m --enable-lora --max-loras 2", "--enable-lora", "leave it out"),
        ("m --enable-sleep-mode", "--enable-sleep-mode", "leave it out"),
        ("m --cpu-offload-gb 8", "--cpu-offload-gb", "leave it out"),
        ("m --offload-group-size 8", "--offload-group-size", "leave it out"),
        ("m --ubatch-size 2", "--ubatch-size", "leave it out"),
        ("m --prefill-context-parallel-size 2", "--prefill-context-parallel-size", "leave it out"),
        ("m --dtype float16", "--dtype", "bfloat16"),
        ("m --quantization fp8", "--quantization", "leave it out"),
        ("m -tp 2 -dp 4 --enable-expert-parallel", "--tensor-parallel-size", "one of the two"),
        ("m -dp 8 -ep --all2all-backend=deepep_low_latency", "--all2all-backend", "allgather_reducescatter"),
        ("m --moe_backend deep_gemm_mega_moe", "--moe-backend", "bypasses"),
        ("m --expert-placement-strategy round_robin", "--expert-placement-strategy", "linear"),
        ("org/DeepSeek-V4.1-Flash -tp 8", "--attention-backend", "FLASHMLA_SPARSE_DSV41"),
    ],
)
def test_what_to_change_is_said_flag_by_flag(words: str, subject: str, change: str) -> None:
    line = _advise(words)[subject]
    assert not line.ok
    assert change in line.what_to_do


def test_flags_that_turn_nothing_on_are_no_obstacle() -> None:
    assert _advise("m --ubatch-size 0 -pcp 1 --cpu-offload-gb 0 --dtype bfloat16")["command"].ok


@pytest.mark.parametrize("words", ["", "--tensor-parallel-size 2 some/Model"])
def test_a_command_that_names_no_model_says_so(words: str) -> None:
    line = _advise(words)["checkpoint"]
    assert (line.found, line.ok) == ("no model was named", False)
    assert "right behind 'vllm serve'" in line.what_to_do


def test_other_commands_are_refused() -> None:
    with pytest.raises(ValueError, match=r"starts with 'vllm serve', found 'python -m'"):
        advice.command(["python", "-m", "x"], FusionPolicy())
    with pytest.raises(ValueError, match="positive number, found 'two'"):
        _advise("m -tp two")


def test_an_inactive_plugin_is_loud(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM only logs what does not load; the doctor says what stands in the way, and a script can see it."""
    monkeypatch.setattr(versions, "installed", lambda: None)
    assert _doctor(0) == "vLLM is not installed: pip install 'foldmoe[vllm]'"
    monkeypatch.setattr(versions, "installed", lambda: "0.99.0")
    assert "vLLM 0.99.0 was not tried" in _doctor(1)
    monkeypatch.setattr(versions, "installed", lambda: "0.32.0")
    monkeypatch.setattr(plugin, "active", lambda: None)
    assert "entry point" in _doctor(1)
    monkeypatch.setattr(plugin, "active", lambda: "foldmoe = x")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert "VLLM_PLUGINS=other" in _doctor(1)
    monkeypatch.delenv("VLLM_PLUGINS")

    def broken() -> None:
        raise ImportError("no such class")

    monkeypatch.setattr(plugin, "register", broken)
    assert _doctor(1) == "ImportError: no such class"
    assert advice.plugin_state().found == "does not load"
    monkeypatch.setattr(plugin, "register", lambda: None)
    monkeypatch.setattr(plugin, "record", lambda: None)
    assert _doctor(0) == "FOLDMOE_FOLD=stock turns it off"


def _doctor(status: int) -> str:
    """What ``foldmoe doctor`` advises about the plugin, once it has ended with this exit status and shown it."""
    done = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "250"})
    said = advice.plugin_state().what_to_do
    assert (done.exit_code, said in done.output) == (status, True), done.output
    return said


@pytest.mark.parametrize("name", list(DEPLOYMENTS))
def test_published_deployments_have_nothing_against_them(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    lines = advice.command(shlex.split(deployment.hopper), FusionPolicy())
    assert [line.subject for line in lines if not line.ok] == ["checkpoint"]  # a repository's, which is not read here
    printed = CliRunner().invoke(app, ["doctor", "--deployment", name]).stdout
    assert deployment.server in printed
    assert printed.count("vllm bench serve") == len(deployment.loads)


def test_the_command_line_takes_a_whole_command() -> None:
    result = CliRunner().invoke(app, ["doctor", "--", "vllm", "serve", str(TINY_V4), "--enable-eplb"])
    assert result.exit_code == 0
    assert "--enable-eplb" in result.stdout
    assert CliRunner().invoke(app, ["doctor", "--deployment", "no"]).exit_code != 0
