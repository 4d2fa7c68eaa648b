"""Small layers of every pair of formats under NVIDIA's compute-sanitizer, and what racecheck's hazards are.

    python -m tests.hopper.sanitized memcheck    # or racecheck

memcheck watches every kernel: prologue, folded launch and combine, a layer on the Triton backend, and torch's own, each
tensor an allocation of its own. racecheck watches the folded launch alone, whose warps share memory with each other.

racecheck follows an mbarrier at which every thread arrives, and so the ring of tickets is handed over. It does not
follow one that a single thread signals for a warpgroup behind a barrier of the warpgroup, which is how Gluon signals
(``handoff.cu`` shows it in a few lines); ``ordering.py`` follows those. compute-sanitizer 2026.4.0 reports nothing
(``pip install nvidia-cuda-sanitizer-api==13.5.25``). 2025.3.1 reports, once a launch, the word by which Triton
dispatches warps, written and read on both sides of a barrier of all threads: ``dispatch.py`` has it reported of roles
that share nothing. Hazards of that kind are counted (:data:`KNOWN`), another one is printed whole and makes this fail.

Scratch memory and outputs are NaN before every layer, and what it returns is compared with the oracle.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections import Counter
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from foldmoe.backends import hopper
from foldmoe.reference import relative_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

KERNELS = Path(hopper.__file__).parent / "kernels"

KNOWN = {
    frozenset({("Write", "folded.folded_moe"), ("Read", "folded.folded_moe")}): "Triton's dispatch of warps",
}
"""Pairs of accesses: what they do, and the function that they stand in."""

PAIRS = (
    ("mxfp4-fp8", "fp8"),
    ("mxfp4-fp8_32", "fp8"),
    ("fp8-fp8", "fp8"),
    ("fp8_32-fp8_32", "fp8"),
    ("bf16-bf16", "bf16"),
    ("mxfp4-fp8", "fp8_token"),
)

TRITON_PAIR = ("mxfp4-fp8", "fp8")
TOKENS = (3, 65)
"""Few and many tiles."""

TOLERANCE = 2e-2
"""Of an output's relative error. The GPU tests know each format's; here a wrong tile is looked for."""


@cache
def _functions(file: str) -> dict[str, range]:
    """Lines of a kernel file's functions."""
    path = KERNELS / file
    tree = ast.parse(path.read_text()) if path.exists() else ast.Module([], [])
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return {node.name: range(node.lineno - len(node.decorator_list), (node.end_lineno or 0) + 1) for node in found}


def place(file: str, line: int) -> str:
    """``file.py:81`` as ``file.function``; with its line where no function of the launch holds it."""
    names = [name for name, lines in _functions(file).items() if line in lines]
    return f"{file.removesuffix('.py')}.{names[0]}" if names else f"{file}:{line}"


def hazards(said: str) -> tuple[Counter[str], list[str]]:
    """How many of racecheck's hazards are of each known kind, and all others as they were printed."""
    known, others = Counter[str](), []
    for block in re.findall(r"^=+ \w+: (?:Race reported|Potential).*?(?=^=+ *$|\Z)", said, re.DOTALL | re.MULTILINE):
        accesses = re.findall(r"(Read|Write) access at .*? in (?:\S*/)?(\w+\.py):(\d+)", block)
        first, *rest = [(kind, place(file, int(line))) for kind, file, line in accesses] or [("", "")]
        kinds = {KNOWN.get(frozenset({first, other})) for other in rest}
        if len(kinds) == 1 and (kind := kinds.pop()) and len(accesses) == block.count(" access at "):
            known[kind] += 1
        else:
            others.append(block)
    return known, others


def told(name: str, forward: Callable[[], Tensor], want: Tensor) -> str:
    """A line that ends in "right" or "wrong"; then, what is wrong, and what a second call gives."""
    y = forward()
    if (error := relative_error(y, want)) <= TOLERANCE:
        return f"{name} {error:.1e} right"
    off = ~((y.double() - want.double()).abs() <= TOLERANCE * want.double().abs().max())
    first = off.nonzero()[:8].tolist()
    where = f"{int(off.sum())} of {off.numel()} values ({int(y.isnan().sum())} NaN), the first at {first}"
    return f"{name} {error:.1e} wrong\n  {where}; once more: {relative_error(forward(), want):.1e}"


def _layers() -> Iterator[tuple[str, Callable[[], Tensor], Tensor]]:
    """Arguments of :func:`told`."""
    from tests.hopper.gpu_layers import Shape, case_of, gpu_layer, gpu_weights, run
    from tests.triton.support import call_of, expected, pack

    for backend, pair, activations in (*(("hopper", *kind) for kind in PAIRS), ("triton", *TRITON_PAIR)):
        shape = Shape(pair, 256, 192, 128, activations)
        stored = gpu_weights(shape)
        for tokens in TOKENS:
            case = case_of(shape, tokens, "random")
            if backend == "hopper":
                forward = partial(run, gpu_layer(shape), case)
            else:
                forward = partial(pack(*stored, activations).forward, call_of(case), folded=True)
            yield f"{backend} {pair} {activations} {tokens}", forward, expected(case, *stored, activations)


def run_layers() -> None:
    """What the sanitizer watches. Names the layers that ran in stderr: stdout is the sanitizer's, which cuts lines."""
    from tests.support.poison import nan_in_new_memory, poison

    with nan_in_new_memory():
        for name, forward, want in _layers():
            poison()
            print(told(name, forward, want), file=sys.stderr)


def main(tool: str) -> int:
    """Run the layers under ``tool``; 0 if all are right and nothing but known hazards was found."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "0"]
    if tool == "racecheck":
        command += ["--kernel-name", "kns=folded_moe"]
    layers = [sys.executable, "-m", "tests.hopper.sanitized", "layers"]
    apart = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    watched = subprocess.run([*command, *layers], capture_output=True, text=True, env=apart)
    said = watched.stdout
    known, others = hazards(said)
    print("".join(others) if tool == "racecheck" else said)
    for kind, count in known.items():
        print(f"{count} hazards whose order racecheck does not see: {kind}")
    ran = re.findall(r"^(?:hopper|triton) \S+-\S+ \S+ \d+ \S+ (right|wrong)$", watched.stderr, re.MULTILINE)
    wanted, right = len(TOKENS) * (len(PAIRS) + 1), ran.count("right")
    if right < wanted:
        print(watched.stderr)
    summary = re.search(r"SUMMARY: (\d+) .*", said)
    print(f"{len(ran)} of {wanted} layers ran, {right} right; {tool}: {summary[0] if summary else 'no summary'}")
    expected = known.total() if tool == "racecheck" else 0
    return int(summary is None or int(summary[1]) != expected or bool(others) or right < wanted)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tool", choices=("memcheck", "racecheck", "layers"))
    asked = parser.parse_args().tool
    sys.exit(run_layers() if asked == "layers" else main(asked))
