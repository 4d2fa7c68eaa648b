"""One vLLM configuration, with groups of one rank, for all layers that are built in this process."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from foldmoe.integrations.vllm import plugin

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    """vLLM's ``VllmConfig``, the current one."""
    pytest.importorskip(
        "vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own"
    )
    from vllm import distributed
    from vllm.config import VllmConfig, set_current_vllm_config

    plugin.register()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    config = VllmConfig()
    with set_current_vllm_config(config), pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", port)
        distributed.init_distributed_environment(1, 0, "env://", 0, "gloo")
        distributed.initialize_model_parallel(1, 1)
        yield config
        distributed.destroy_model_parallel()
        distributed.destroy_distributed_environment()
