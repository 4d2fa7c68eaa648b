"""Runs as a process of its own: start the kernels of both GPU backends, print Triton's cache key of each.

    python -m tests.runtime.cache_keys TOKENS TOKENS ...

Batches come in the order given.
"""

from __future__ import annotations

import sys

from foldmoe.backends import get
from foldmoe.planner.devices import resolve
from tests.runtime import support
from tests.runtime.test_warmup import variants


def main() -> None:
    tokens = tuple(int(word) for word in sys.argv[1:])
    for backend in ("hopper", "triton"):
        plan = support.plan(backend)
        outline = get(backend).outline(plan.spec, plan.activations, resolve("h200"))
        kernels = {key[0] for arm in ("folded", "dual") for key in variants(outline, "meta", tokens, arm)}
        print(*sorted(f"{backend} {kernel.__name__} {kernel.cache_key}" for kernel in kernels), sep="\n")


if __name__ == "__main__":
    main()
