"""One server while it serves: the arm's environment, proof that it runs the arm, and runs of the client against it."""

from __future__ import annotations

import json
import os
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from foldmoe.bench.serve import arms, client, observe, ranks
from foldmoe.bench.serve.results import Run, Server
from foldmoe.bench.serve.server import RunningServer, command_line

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from foldmoe.bench.serve.arms import Arm
    from foldmoe.bench.serve.client import Client
    from foldmoe.bench.serve.ranks import Rank
    from foldmoe.bench.serve.workloads import Workload


@dataclass(frozen=True)
class Options:
    """How servers and clients are run, beside their command lines.

    Args:
        port: that servers listen on, on this machine.
        ready_timeout: seconds that a server may take to become healthy.
        run_timeout: seconds that one run of one workload may take.
    """

    port: int = 8000
    ready_timeout: float = 1800.0
    run_timeout: float = 7200.0


@dataclass(frozen=True)
class Session:
    """A healthy server that was found to run its arm.

    Args:
        arm: the arm.
        repeat: counts from 1.
        record: what is known of the server.
        server: the process.
        log: its output, from here on.
        client: how the client is called.
        raw: folder for the client's own files.
    """

    arm: Arm
    repeat: int
    record: Server
    server: RunningServer
    log: observe.Log
    client: Client
    raw: Path

    def warm(self, workload: Workload, seed: int) -> None:
        """A pass that is not reported, over other prompts: the prefix cache must not answer the measured ones.

        Raises:
            ServerError, ClientError: as :meth:`Client.run`.
        """
        self.client.run(workload, self.server, seed=seed + 1, out=self._file(workload, "-warm"))

    def measure(self, workload: Workload, seed: int) -> Run:
        """A run; see ``invalid`` for whether it counts.

        Raises:
            ServerError, ClientError: as :meth:`Client.run`.
        """
        self.log.new()  # what was logged before is none of this run's
        before, start = self.server.get("/metrics"), time.monotonic()
        found = self.client.run(workload, self.server, seed=seed, out=self._file(workload))
        seconds = float(found.get("duration") or time.monotonic() - start)
        run = client.checked(found, workload, arm=self.arm.name, repeat=self.repeat, seconds=seconds)
        hits = observe.hit_share(before, self.server.get("/metrics"))
        return replace(run, prefix_hits=hits, compiled=observe.compiled(self.log.new()))

    def _file(self, workload: Workload, suffix: str = "") -> Path:
        name = workload.name.replace("/", "-").replace(" ", "-")
        return self.raw / f"{self.arm.name}-{self.repeat}-{name}{suffix}.json"


@contextmanager
def serve(arm: Arm, repeat: int, serve_cmd: str, client: Client, folder: Path, options: Options) -> Iterator[Session]:
    """Start a server in the arm's environment, see that it runs the arm, and end it afterwards, whatever happens.

    Args:
        folder: gets ``logs/``, ``raw/`` and ``state/``.

    Raises:
        ServerError: it did not start.
        ArmError: it runs another arm, or does not say which.
        OSError: the port is in use, or there is no such program.
        ValueError: a command line that names another port, or state files that another version wrote.
    """
    name = f"{arm.name}-{repeat}"
    state, log = folder / "state" / name, folder / "logs" / f"{name}.log"
    for path in (state, log.parent, folder / "raw"):
        path.mkdir(parents=True, exist_ok=True)
    for old in state.iterdir():
        old.unlink()
    command = command_line(serve_cmd, options.port)
    server = RunningServer(command, options.port, _environment(arm, state), log)
    try:
        seconds = server.wait_until_healthy(options.ready_timeout)
        found = ranks.read(state)
        if reason := arm.refuted(found):
            raise arms.ArmError(reason)
        text = observe.Log(log)
        record = _record(arm, repeat, server, found, text.new(), seconds, str(log.relative_to(folder)))
        yield Session(arm, repeat, record, server, text, client, folder / "raw")
    finally:
        server.stop()


def _environment(arm: Arm, state: Path) -> dict[str, str]:
    changes = {**arm.environment, "FOLDMOE_STATE_DIR": str(state.resolve())}
    kept = {name: value for name, value in os.environ.items() if name not in changes}
    return kept | {name: value for name, value in changes.items() if value is not None}


def _record(
    arm: Arm, repeat: int, server: RunningServer, found: list[Rank], text: str, seconds: float, log: str
) -> Server:
    page = server.get("/metrics") or ""
    blocks = [rank.kv_blocks for rank in found if rank.kv_blocks is not None]
    loaded = [rank.model_load_bytes for rank in found if rank.model_load_bytes is not None]
    versions = dict(found[0].versions)
    with suppress(ValueError, KeyError, TypeError):
        versions["vllm"] = json.loads(server.get("/version") or "")["version"]
    return Server(
        arm=arm.name,
        repeat=repeat,
        environment=arm.environment,
        runs_as=found[0].runs,
        decisions=ranks.together(found).decisions(),
        notes=observe.tuned_tables(text),
        versions=versions,
        start_seconds=seconds,
        model_load_bytes=max(loaded, default=None) or observe.weights_bytes(text),
        workspace_bytes=max(rank.workspace_bytes for rank in found),
        kv_blocks=min(blocks, default=None) or observe.kv_blocks(page),
        log=log,
    )
