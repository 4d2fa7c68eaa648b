"""The client: ``vllm bench serve``, one run of it for one workload; what it wrote, checked."""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foldmoe.bench.serve.processes import Child
from foldmoe.bench.serve.results import Run
from foldmoe.bench.serve.server import HOST

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from foldmoe.bench.serve.server import RunningServer
    from foldmoe.bench.serve.workloads import Workload

_POLL = 0.2
_STOP_SECONDS = 2.0
_FLAGS = (
    "--dataset-name random --random-range-ratio 0 --random-prefix-len 0 --request-rate inf --ignore-eos "
    "--temperature 0 --num-warmups 2 --percentile-metrics ttft,tpot,itl,e2el --metric-percentiles 50,95,99"
)
"""As the published comparisons were made; warm-ups default to 0 in vLLM, so that they are given."""

_PER_REQUEST = ("output_lens", "ttfts", "itls", "generated_texts", "errors")
_TOO_LONG = (
    "; vLLM refuses prompts of more tokens than --max-model-len less the answer's, or of more characters than so many "
    "of the tokenizer's longest token have"
)
"""What "Bad Request" may mean; the client passes no reason on."""


class ClientError(Exception):
    """A client that failed or hung; the message says why."""


@dataclass(frozen=True)
class Client:
    """How the client is called.

    Args:
        command: its command line, ``vllm bench serve`` with whatever the user adds.
        environment: the whole environment.
        timeout: seconds after which a run has hung.
    """

    command: str
    environment: Mapping[str, str]
    timeout: float

    def arguments(self, workload: Workload, *, seed: int, port: int, out: Path) -> list[str]:
        """All arguments of one run."""
        return [
            *shlex.split(self.command),
            *_FLAGS.split(),
            *("--host", HOST, "--port", str(port), "--seed", str(seed)),
            *("--random-input-len", str(workload.input_len), "--random-output-len", str(workload.output_len)),
            *("--max-concurrency", str(workload.concurrency), "--num-prompts", str(workload.num_prompts)),
            *("--save-result", "--save-detailed", "--result-dir", str(out.parent), "--result-filename", out.name),
        ]

    def run(self, workload: Workload, server: RunningServer, *, seed: int, out: Path) -> dict[str, Any]:
        """What the client wrote to ``out``.

        Raises:
            ServerError: the server ended meanwhile.
            ClientError: the client ended with an error, hung, or wrote no result.
        """
        out.unlink(missing_ok=True)
        arguments = self.arguments(workload, seed=seed, port=server.port, out=out)
        child = Child(arguments, out.with_suffix(".log"), self.environment)
        end = time.monotonic() + self.timeout
        try:
            while (status := child.wait(_POLL)) is None:
                server.check_alive()
                if time.monotonic() > end:
                    raise ClientError(f"the client still ran after {self.timeout:.0f} s: the server may hang")
        finally:
            child.stop(_STOP_SECONDS)
        server.check_alive()  # a server that dies makes the client fail, and is the better reason
        if status:
            last = child.tail(1).strip()
            raise ClientError(f"the client ended with status {status}: {last} (all of it: {child.log})")
        try:
            found: dict[str, Any] = json.loads(out.read_text())
        except (OSError, ValueError) as error:
            raise ClientError(f"the client wrote no result to {out}: {error}") from error
        return found


def checked(found: dict[str, Any], workload: Workload, *, arm: str, repeat: int, seconds: float) -> Run:
    """A run, with every reason why it would not count.

    Raises:
        ClientError: the result lacks the lists that ``--save-detailed`` writes.
    """
    if missing := [name for name in _PER_REQUEST if name not in found]:
        raise ClientError(f"the client's result lacks {', '.join(missing)}: is it `vllm bench serve`?")
    lengths, errors = found["output_lens"], [error for error in found["errors"] if error]
    completed, requested = int(found["completed"]), workload.num_prompts
    short = sum(length != workload.output_len for length in lengths)
    invalid = []
    if completed != requested:
        first = f", the first with: {str(errors[0]).strip().splitlines()[-1]}" if errors else ""
        hint = _TOO_LONG if "Bad Request" in first else ""
        invalid.append(f"{requested - completed} of {requested} requests failed{first}{hint}")
    elif errors:
        invalid.append(f"{len(errors)} requests report errors, the first: {errors[0]}")
    if short:
        share = f"{short} of {len(lengths)} answers ({short / len(lengths):.1%})"
        shortest = min(lengths)
        invalid.append(f"{share} do not have the {workload.output_len} tokens asked for; the shortest has {shortest}")
    metrics = {
        name: float(value)
        for name, value in found.items()
        if type(value) in (int, float) and (name.endswith(("_ms", "_throughput")))
    }
    if broken := sorted(name for name, value in metrics.items() if not math.isfinite(value)):
        invalid.append(f"the client reports no number for {', '.join(broken)}")
    return Run(
        arm,
        repeat,
        workload.name,
        {name: value for name, value in metrics.items() if name not in broken},
        seconds,
        requested,
        completed,
        short,
        tuple(invalid),
        tuple(first + sum(rest) for first, rest in zip(found["ttfts"], found["itls"], strict=True)),
        tuple(hashlib.sha256(text.encode()).hexdigest()[:8] for text in found["generated_texts"]),
        longest_gap=max((gap for gaps in found["itls"] for gap in gaps), default=0.0),
    )
