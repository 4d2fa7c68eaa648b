"""Small layers of every pair of formats under NVIDIA's compute-sanitizer, and what racecheck's hazards are.

    python -m tests.hopper.sanitized memcheck    # or racecheck

racecheck follows an mbarrier at which every thread arrives. It does not follow one that a single thread signals for a
warpgroup behind a barrier of the warpgroup, which is how Gluon signals (``handoff.cu`` shows it in a few lines).
Hazards at the two places of the launch that hand over values so, and at the word by which Triton dispatches warps,
behind barriers of all threads, are counted (:data:`KNOWN`); any other one is printed whole and makes this fail.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

from foldmoe.backends import hopper

KERNELS = Path(hopper.__file__).parent / "kernels"

KNOWN = {
    frozenset({"tickets.receive", "tickets.hand_out"}): "ring of tickets",
    frozenset({"epilogue.finish_up"}): "largest values between warpgroups",
    frozenset({"folded.folded_moe"}): "Triton's dispatch of warps",
}
"""Functions that both accesses of a hazard stand in. ``folded_moe`` itself reads and writes no shared memory."""

PAIRS = (
    ("mxfp4-fp8", "fp8"),
    ("mxfp4-fp8_32", "fp8"),
    ("fp8-fp8", "fp8"),
    ("fp8_32-fp8_32", "fp8"),
    ("bf16-bf16", "bf16"),
    ("mxfp4-fp8", "fp8_token"),
)


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
    """How many hazards of each kind that is known racecheck printed, and all others."""
    known, others = Counter[str](), []
    for block in re.findall(r"^=+ Error: (?:Race reported|Potential).*?(?=^=+ *$|\Z)", said, re.DOTALL | re.MULTILINE):
        places = [place(file, int(line)) for file, line in re.findall(r" in (?:\S*/)?(\w+\.py):(\d+)", block)]
        kinds = {KNOWN.get(frozenset({places[0], other})) for other in places[1:]} if places else {None}
        if None in kinds or not kinds:
            others.append(block)
        else:
            known.update(kind for kind in kinds if kind)
    return known, others


def run_layers() -> None:
    """What the sanitizer watches."""
    import torch

    from tests.hopper.gpu_layers import Shape, case_of, gpu_layer, run

    for pair, activations in PAIRS:
        shape = Shape(pair, 256, 192, 128, activations)
        for tokens in (3, 65):  # few and many tiles
            y = run(gpu_layer(shape), case_of(shape, tokens, "random"))
            torch.cuda.synchronize()
            print(pair, activations, tokens, f"{y.float().abs().mean():.3f}", flush=True)


def main(tool: str) -> int:
    if tool == "layers":
        run_layers()
        return 0
    command = ["compute-sanitizer", "--tool", tool, "--kernel-name", "kns=folded_moe", "--print-limit", "0"]
    layers = [sys.executable, "-m", "tests.hopper.sanitized", "layers"]
    done = subprocess.run([*command, *layers], stdout=subprocess.PIPE, text=True)
    known, others = hazards(done.stdout)
    print("".join(others) if tool == "racecheck" else done.stdout)
    for kind, count in known.items():
        print(f"{count} hazards whose order racecheck does not see: {kind}")
    ran = len(re.findall(r"^\S+-\S+ \S+ \d+ [\d.]+$", done.stdout, re.MULTILINE))
    summary = re.findall(r"SUMMARY: .*", done.stdout)
    print(f"{ran} of {2 * len(PAIRS)} layers ran; {tool}: {summary[-1] if summary else 'no summary'}")
    failed = others if tool == "racecheck" else done.returncode
    return int(bool(failed) or not summary or ran < 2 * len(PAIRS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
