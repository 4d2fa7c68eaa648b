"""``register``: what vLLM calls in every process, before it builds a model."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import torch

import foldmoe.backends  # noqa: F401  registers the backends that plans ask
from foldmoe import settings
from foldmoe.integrations.vllm import reloading, versions
from foldmoe.integrations.vllm.record import Record

ENTRY_POINT = "foldmoe"
GROUP = "vllm.general_plugins"

_record: Record | None = None


def register() -> None:
    """Replace vLLM's ``RoutedExperts`` and ``MoERunner``; any number of calls count as one.

    A vLLM version that this was not tried with is declined with a warning that names the tried ones.

    Raises:
        ValueError: a ``FOLDMOE_`` variable that is misspelt or has an unknown value: the server must not start as if
            nothing had been asked.
    """
    global _record
    if _record is not None:
        return
    version = versions.installed()
    if against := versions.objection(version):
        logger().warning("foldmoe: %s", against)
        return
    chosen = settings.read()
    _record = Record(
        chosen.policy,
        chosen.state_dir,
        {"foldmoe": metadata.version("foldmoe"), "vllm": metadata.version("vllm")},
        compile_ahead=chosen.compile_ahead,
    )
    from vllm.model_executor.layers.fused_moe import MoERunner, RoutedExperts

    from foldmoe.integrations.vllm.layers import FoldedRoutedExperts, FoldedRunner, watch

    RoutedExperts.register_oot(FoldedRoutedExperts, name="RoutedExperts")
    MoERunner.register_oot(FoldedRunner, name="MoERunner")
    watch()
    logger().info("foldmoe: active, fold %s", chosen.policy.fold)


def logger() -> logging.Logger:
    """A child of vLLM's logger, so that lines appear where a server's do, with its prefix."""
    return logging.getLogger("vllm.foldmoe")


def active() -> str | None:
    """What makes vLLM load this plugin, e.g. ``foldmoe = foldmoe.integrations.vllm:register``; None if nothing does."""
    for point in metadata.entry_points(group=GROUP):
        if point.name == ENTRY_POINT:
            return f"{point.name} = {point.value}"
    return None


def record() -> Record:
    """This process's layers."""
    if _record is None:
        raise RuntimeError("foldmoe's vLLM plugin is not registered")
    return _record


def note_loaded(engine: Any) -> None:
    """A layer has its weights; once all have, ranks compare what they decided, the log says it, and their kernels are
    compiled beside whatever vLLM does next.

    Args:
        engine: vLLM's ``VllmConfig``.

    Raises:
        PlanMismatchError: ranks that decided differently.
    """
    found = record()
    if not found.complete:
        return
    reloading.guard()
    from vllm.distributed import get_world_group

    from foldmoe.parallel.transport import DistributedTransport

    world = get_world_group()
    found.rank, found.world_size = world.rank, world.world_size
    found.device = "cuda" if torch.cuda.is_available() else "cpu"
    if found.device == "cuda":
        found.model_load_bytes = torch.cuda.memory_allocated()
    sharing = _sharing(engine)
    if sharing is not None and sharing.world_size > 1:
        found.agree(DistributedTransport(sharing.cpu_group))
    for line in found.lines():
        logger().info(line)
    found.write()
    if found.device == "cuda" and found.compile_ahead:
        from foldmoe.integrations.vllm import ahead

        ahead.begin(found.plans[found.begun :], engine, world.local_rank)
        found.begun = len(found.plans)


def _sharing(engine: Any) -> Any:
    """vLLM's group of all ranks that hold the same layers (pipeline stages hold others); None if there is none to ask.

    Elastic expert parallelism, with which nothing folds, has ranks come later and alone, and groups that torch does not
    know. Without an expert-parallel group vLLM does not take the model for one with experts.
    """
    from vllm.distributed import get_ep_group, get_tp_group

    if engine.parallel_config.enable_elastic_ep:
        return None
    try:
        return get_ep_group()
    except AssertionError:
        return get_tp_group()


def note_forward(engine: Any) -> None:
    """Before a layer runs: write down how many blocks the KV cache got, which is known after loading.

    Args:
        engine: vLLM's ``VllmConfig``, whose worker enters the number; while it measures graphs, a small one for a time.
    """
    found, blocks = record(), engine.cache_config.num_gpu_blocks
    if blocks and blocks != found.kv_blocks:
        found.kv_blocks = blocks
        found.write()


def mark_compiled_code(config: Any) -> None:
    """Keep vLLM's compile cache apart: its key knows the model's configuration, not which layers are folded here."""
    found = record()
    if isinstance(config.additional_config, dict):
        config.additional_config["foldmoe"] = f"{found.versions['foldmoe']} {found.digest}"
