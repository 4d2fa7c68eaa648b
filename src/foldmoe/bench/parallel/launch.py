"""Start a process a rank, wait for all of them, read what they found."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

from foldmoe.bench.parallel.layers import compile_kernels
from foldmoe.bench.parallel.result import TRANSPORTS, ParallelRequest, ParallelResult
from foldmoe.bench.parallel.worker import READY, work
from foldmoe.bench.shapes import CUT_IN_WIDTH, SHAPES

_CHOICES = {"transports": tuple(TRANSPORTS), "arms": ("folded", "dual-stream"), "schemes": ("native", "slot")}


def run(request: ParallelRequest, out: Path | None = None) -> ParallelResult:
    """Time the layer over all ranks.

    Args:
        request: what to time.
        out: keeps the result, written anew after each number of tokens.

    Raises:
        ValueError: an unknown shape, transport, arm or scheme, or no tokens.
        ProcessRaisedException: what a rank raised.
    """
    known = [shape for shape in SHAPES if shape not in CUT_IN_WIDTH]
    if request.shape not in known:
        raise ValueError(f"no shape {request.shape!r}; there are: {', '.join(known)}")
    for name, allowed in _CHOICES.items():
        if wrong := [one for one in getattr(request, name) if one not in allowed]:
            raise ValueError(f"no {name.removesuffix('s')} {wrong[0]!r}; there are: {', '.join(allowed)}")
    if not request.tokens or min(request.tokens) < 1:
        raise ValueError(f"tokens must be numbers from 1 up, found {list(request.tokens)}")
    ranks = request.ranks or max(2, torch.cuda.device_count())
    with tempfile.TemporaryDirectory() as folder:
        out = out or Path(folder) / "result.json"
        ready = Path(folder) / READY
        context = spawn(work, (request, ranks, str(Path(folder) / "store"), str(out)), nprocs=ranks, join=False)
        try:
            if torch.cuda.device_count() >= ranks:
                compile_kernels(request, ranks, torch.device("cuda", 0))  # while ranks make weights
        finally:
            ready.touch()
        assert context is not None
        while not context.join():
            pass
        return ParallelResult.load(out)
