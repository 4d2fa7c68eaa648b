"""The kernels under Triton's interpreter, each file in a process of its own (see ``conftest.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent / "interpreted"
ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("test_*.py")))
def test_interpreted(name: str) -> None:
    command = [sys.executable, "-m", "pytest", str(FOLDER / f"{name}.py"), "-q", "-p", "no:cacheprovider", "--no-cov"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
