"""Kernels for every batch size, compiled beside vLLM's own start-up: no request then waits ten seconds for one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from foldmoe.integrations.vllm.plugin import logger
from foldmoe.planner.devices import resolve
from foldmoe.warming import Calls, Report, compile_beside, sizes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.planner import LayerPlan

LARGEST = 16384
"""Tokens up to which batches differ in what they launch."""


def begin(plans: Sequence[LayerPlan], engine: Any, local_rank: int) -> None:
    """Start compiling what ``plans`` launch, for all ranks of this host: they share a cache. A log line tells the end.

    Args:
        engine: vLLM's ``VllmConfig``: how many tokens a step has, on how many ranks that are gathered, and their dtype.
        local_rank: this rank's number on its host, within its replica; one rank a host compiles.
    """
    if local_rank or engine.parallel_config.data_parallel_rank_local:
        return
    most = engine.scheduler_config.max_num_batched_tokens * engine.parallel_config.data_parallel_size
    calls = Calls(sizes(min(most, LARGEST)), engine.model_config.dtype)
    processes = max(1, min(8, (os.cpu_count() or 1) // 2))
    compile_beside(plans, calls, resolve(torch.device("cuda")), processes=processes, done=_tell)


def _tell(report: Report | Exception) -> None:
    if isinstance(report, Report):
        ready = len(report.compiled) + len(report.cached)
        if ready:
            logger().info(
                "foldmoe: %d kernels ready for every batch size after %.0f s, %d of them compiled now",
                ready,
                report.seconds,
                len(report.compiled),
            )
        return
    logger().warning("foldmoe: kernels are compiled when first needed, because compiling them ahead failed: %s", report)
