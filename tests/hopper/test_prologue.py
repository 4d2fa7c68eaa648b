"""The plain Triton kernels round the launch, on the CPU interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip(
    "triton", reason="NOT CHECKED: the Hopper prologue and combine need triton (pip install foldmoe[gpu])"
)


def test_prologue_and_combine_match_plain_torch():
    root = Path(__file__).parents[2]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((str(root / "src"), str(root)))}
    done = subprocess.run(
        [sys.executable, "-m", "tests.hopper.interpret"], cwd=root, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "cases" in done.stdout
