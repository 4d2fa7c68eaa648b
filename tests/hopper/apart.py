"""GPU tests whose programs need a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

NEEDS_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="NOT CHECKED: needs a Hopper GPU",
    ),
]


def run_apart(program: str, *arguments: str, at_once: int = 1, **variables: str) -> str:
    """What so many processes of ``program`` at once print; fails where one of them does."""
    root = Path(__file__).parents[2]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env=os.environ | {"PYTHONPATH": f"{root}:{root / 'src'}"} | variables,
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(at_once)
    ]
    try:
        said = [process.communicate(timeout=240) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), "\n".join(out + err for out, err in said)
    return "\n".join(out for out, _ in said)
