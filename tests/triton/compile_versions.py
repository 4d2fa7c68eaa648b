"""Compile the main layer's kernels and the Hopper launch for sm_90 with several versions of Triton; no GPU needed.

    pip install --no-deps --target FOLDER triton==3.9.0
    python tests/triton/compile_versions.py FOLDER OTHER_PYTHON ...

An argument is a folder with a Triton in it, put before the running interpreter's own packages, or another Python
interpreter that has torch, triton and what foldmoe needs. Without arguments: this interpreter as it is. Exits with 1 if
any of them fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = ("main", "bf16")


def compile_here() -> None:
    """Compile everything with this interpreter's Triton."""
    import triton

    from tests.hopper import offline, test_compile
    from tests.triton import aot
    from tests.triton.aot_layers import BF16_LAYER, DECODE, MAIN_LAYER, PREFILL, call_of, layer_of

    for name, facts in zip(LAYERS, (MAIN_LAYER, BF16_LAYER), strict=True):
        layer = layer_of(*facts)
        for tokens in (DECODE, PREFILL):
            for found in aot.record(layer, call_of(tokens), aot.TARGETS["sm_90"][1]):
                start = time.monotonic()
                kernel = aot.compile_for(found, "sm_90")
                with tempfile.TemporaryDirectory() as folder:
                    usage = aot.spills(kernel, Path(folder))
                seconds = time.monotonic() - start
                print(
                    f"triton {triton.__version__}  {name:5} M={tokens:<5} {found.name:8} {seconds:5.1f} s  {usage}",
                    flush=True,
                )
    names = ("FLASH", "NARROW", "V41", "TOKEN", "V3", "BF16")
    for geometry in (getattr(test_compile, name) for name in names):
        chosen = test_compile.every(geometry)
        for config in (chosen[0], max(chosen, key=lambda config: (config.tokens, config.between))):
            start = time.monotonic()
            found = offline.report(offline.compile_config(config))
            assert not found.warnings, found
            assert not found.at_barriers, found
            label = f"triton {triton.__version__}  hopper {test_compile.name(config)}"
            spills = f"{found.spilled} bytes spilled, {found.loop_spills} accesses of them in K loops"
            print(f"{label:58} {time.monotonic() - start:5.1f} s  shared {found.shared}, {spills}", flush=True)


def main(versions: list[str]) -> int:
    failed = []
    for version in versions or [sys.executable]:
        folder = Path(version).resolve() if Path(version).is_dir() else None
        python = sys.executable if folder else version
        paths = [str(folder)] if folder else []
        with tempfile.TemporaryDirectory() as cache:  # a version must not find another's kernels
            environment = os.environ | {
                "PYTHONPATH": os.pathsep.join((*paths, str(ROOT), str(ROOT / "src"))), "TRITON_CACHE_DIR": cache,
            }  # fmt: skip
            done = subprocess.run([python, str(Path(__file__)), "--here"], env=environment, check=False)
        if done.returncode:
            failed.append(version)
    print(f"failed: {', '.join(failed)}" if failed else "all compiled")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--here"]:
        compile_here()
    else:
        sys.exit(main(sys.argv[1:]))
