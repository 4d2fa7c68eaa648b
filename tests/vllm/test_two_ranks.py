"""Two processes load a layer over gloo: they go on where they decided alike, and both stop with the reason if not."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")

SECONDS = 240


def test_ranks_compare_what_they_decided_once_loaded() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.one_of_two", str(rank), port, fold],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1", "VLLM_DIST_IDENT": port},  # of its shared memory
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, fold in enumerate(("native", "off"))
    ]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, (process, text) in enumerate(zip(started, said, strict=True)):
        assert f"first loaded as rank {rank} of 2" in text, text
        assert "second stopped: ranks of one group must fold alike; start all with the same policy" in text, text
        assert "rank 1 differs from rank 0 in second.experts: strategy is 'serial', not 'native', arm is" in text, text
        assert process.returncode == 0, text
