"""Runs as a process of its own: compile one kernel of ours for sm_90, print whether it was found and its bits.

    python -m tests.runtime.compile_one [kill]

``kill`` ends the process without a word while it stores the machine code, half of it written.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path

import torch
from triton import knobs

import foldmoe  # noqa: F401  follows FOLDMOE_CACHE_DIR
from foldmoe.backends.triton.kernels.routing import scan
from foldmoe.backends.triton.launch import launch
from foldmoe.runtime import kernel_cache
from foldmoe.runtime.kernels import Compiler, compiling
from foldmoe.runtime.offline import standing_in


def die_storing_machine_code() -> None:
    rename = os.replace

    def replace(source: str, target: str) -> None:
        if target.endswith(".cubin"):
            os.truncate(source, Path(source).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    os.replace = replace  # type: ignore[assignment]


def main() -> None:
    if sys.argv[1:] == ["kill"]:
        die_storing_machine_code()
    hits: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    kernels = []
    before = os.environ.get("TRITON_CACHE_DIR")
    with standing_in("cuda", "sm_90"), kernel_cache.used(), compiling(Compiler(lambda name: True, kernels.append)):
        launch(
            scan,
            (1,),
            {
                "counts": torch.empty(4, 64, dtype=torch.int32, device="meta"),
                "totals": torch.empty(64, dtype=torch.int32, device="meta"),
            },
            {"chunks": 4},
            EP=64,
            COLUMNS=32,
            ROWS=16,
        )
    assert os.environ.get("TRITON_CACHE_DIR") == before
    print("found" if hits[0] else "compiled", hashlib.sha256(kernels[0].asm["cubin"]).hexdigest())


if __name__ == "__main__":
    main()
