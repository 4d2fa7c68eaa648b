"""`foldmoe serve`: Transformers' server answers chats, streamed too, with the folded model as with the unfolded one."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from foldmoe import FusionPolicy
from foldmoe.demo import TINY_V4
from foldmoe.integrations.transformers import serving

if TYPE_CHECKING:
    from collections.abc import Iterator

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
QUESTIONS = ("Pip has 4 apples. Tom has 3 more. How many apples does Tom have?", "Mia has 9 pens.")
START_SECONDS = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny-v4 with a chat template, which it has none of: its questions are plain text."""
    folder = tmp_path_factory.mktemp("served") / "tiny-v4"
    shutil.copytree(TINY_V4, folder)
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": TEMPLATE}))
    return folder


@contextmanager
def server(model: Path, fold: str) -> Iterator[tuple[str, list[str]]]:
    """A running server's address, and its output once it has stopped."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = model.parent / f"{fold}.log"
    command = [str(Path(sys.executable).parent / "foldmoe"), "serve", str(model), "--device", "cpu"]
    environment = {**os.environ, "FOLDMOE_FOLD": fold, "HF_HUB_OFFLINE": "1"}
    output: list[str] = []
    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait(address, process, log)
        yield address, output
    finally:
        process.terminate()
        process.wait(30)
        output += log.read_text().splitlines()


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, f"the server stopped at once:\n{log.read_text()[-2000:]}"
        try:
            urllib.request.urlopen(f"{address}/health", timeout=2).close()
            return
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.5)
    pytest.fail(f"no answer within {START_SECONDS} s:\n{log.read_text()[-2000:]}")


def _chat(address: str, model: Path, question: str, *, stream: bool) -> list[dict[str, Any]]:
    """The reply, or the chunks of a streamed one."""
    body = {"model": str(model), "messages": [{"role": "user", "content": question}], "stream": stream}
    settings = {"max_tokens": 24, "temperature": 0.0, "seed": 0}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps({**body, **settings}).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        if not stream:
            return [json.load(reply)]
        lines = [line.decode().strip().removeprefix("data: ") for line in reply if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _streamed(chunks: list[dict[str, Any]]) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.slow
def test_a_folded_model_chats_as_the_unfolded_one(model: Path) -> None:
    if missing := [name for name in serving._NEEDS if find_spec(name) is None]:
        pytest.skip(f"transformers serve needs {', '.join(missing)}: pip install 'foldmoe[serve]'")
    answers: dict[str, list[str]] = {}
    for fold in ("native", "off"):
        with server(model, fold) as (address, output):
            whole = [_chat(address, model, q, stream=False)[0]["choices"][0]["message"]["content"] for q in QUESTIONS]
            chunks = [_chat(address, model, q, stream=True) for q in QUESTIONS]
        assert [_streamed(c) for c in chunks] == whole
        assert all(whole), "an empty answer"
        assert len(chunks[0]) > 2, "a stream in one piece"
        line = next(line for line in output if line.startswith("foldmoe: folded"))
        assert line.startswith("foldmoe: folded 0/") is (fold == "off"), line
        answers[fold] = whole
    assert answers["native"] == answers["off"]


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "find_spec", lambda name: None if name in ("fastapi", "uvicorn") else object())
    with pytest.raises(ValueError, match=r"serving needs fastapi, uvicorn: pip install .*foldmoe\[serve\]"):
        serving.serve([])


def test_models_are_loaded_here_and_as_stored_only(model: Path) -> None:
    pytest.importorskip("transformers")

    class Manager:
        device, dtype, quantization = "cpu", "auto", None

    manager = serving._manager(Manager, FusionPolicy("native"))()
    loaded = manager._load_model(str(model), tqdm_class=None, progress_callback=None)
    assert loaded.fold_report.count("native") == loaded.fold_report.total > 0
    manager.quantization = "bnb-4bit"
    with pytest.raises(ValueError, match="experts run as the checkpoint stores them"):
        manager._load_model(str(model))
