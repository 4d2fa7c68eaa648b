"""A vLLM server of this machine, started for a test and ended with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

START_SECONDS = 420


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Server:
    """One ``vllm serve`` on a CPU.

    Args:
        model: folder of the checkpoint.
        folder: for log and state file.
        fold: FOLDMOE_FOLD.
        arguments: more of ``vllm serve``'s.
        environment: more of the process's.
        compiled: the model under ``torch.compile``, as vLLM serves unless told otherwise.
    """

    model: Path
    folder: Path
    fold: str
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    compiled: bool = False
    port: int = field(default_factory=_free_port)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start; :meth:`wait` for it before use."""
        self.folder.mkdir(parents=True, exist_ok=True)
        vllm = Path(sys.executable).with_name("vllm")
        command = [str(vllm), "serve", str(self.model), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--max-num-seqs", "4", "--served-model-name", "m", *self.arguments]
        command += [] if self.compiled else ["--enforce-eager"]
        environment = {
            **os.environ,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "FOLDMOE_FOLD": self.fold,
            "FOLDMOE_STATE_DIR": str(self.folder),
            **self.environment,
        }
        with (self.folder / "log").open("wb") as log:
            # A session of its own: vLLM's workers are ended with it, whatever state they are in.
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def wait(self) -> None:
        """Until it is healthy.

        Raises:
            RuntimeError: with the end of the log.
        """
        assert self.process is not None
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                    return
            except OSError:
                time.sleep(1)
        raise RuntimeError(f"vLLM did not start (exit code {self.process.poll()}):\n{self.log[-6000:]}")

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def state(self) -> dict[str, Any]:
        return self.state_of(0)

    def state_of(self, rank: int) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / f"rank-{rank}.json").read_text())
        return found

    def metric(self, name: str) -> float:
        """A counter of ``/metrics``, over all its labels.

        Raises:
            KeyError: no such counter.
        """
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        if not found:
            raise KeyError(name)
        return sum(found)

    def post(self, path: str, body: dict[str, Any], rank: int | None = None) -> dict[str, Any]:
        """An answer in one piece, by the data-parallel rank that is asked for, or whichever has time."""
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        answer: dict[str, Any] = json.loads(b"".join(self._send(path, body, headers)))
        return answer

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The events of a streamed answer."""
        lines = [line.decode().removeprefix("data: ").strip() for line in self._send(path, {**body, "stream": True})]
        return [json.loads(line) for line in lines if line and line != "[DONE]"]

    def _send(self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Iterator[bytes]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/{path}",
            json.dumps({"model": "m", **body}).encode(),
            {"content-type": "application/json", **(headers or {})},
        )
        try:
            with urllib.request.urlopen(request, timeout=180) as answer:
                yield from answer
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"vLLM answered {error.code}: {error.read()!r}\n{self.log[-6000:]}") from error

    def scores(
        self, prompts: list[list[int]], top: int = 5, rank: int | None = None
    ) -> list[list[list[tuple[float, int]]]]:
        """Teacher-forced: for each prompt and position the likeliest (log probability, token), best first."""
        found = []
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": top}
            (choice,) = self.post("v1/completions", body, rank)["choices"]
            ranked = (
                (value["logprob"], int(token)) for p in choice["prompt_logprobs"][1:] for token, value in p.items()
            )
            sizes = [len(p) for p in choice["prompt_logprobs"][1:]]
            found.append([sorted((next(ranked) for _ in range(size)), reverse=True)[:top] for size in sizes])
        return found
