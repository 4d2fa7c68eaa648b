"""One of two processes that build layers by vLLM's factory, load them and compare what they decided.

``python -m tests.vllm.one_of_two RANK PORT FOLD``: the policy of the second layer is this rank's own. Prints how each
load ended.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm import distributed
from vllm.config import VllmConfig, set_current_vllm_config

from foldmoe.formats import Format
from foldmoe.integrations.vllm import plugin
from foldmoe.parallel.agree import PlanMismatchError
from foldmoe.planner import FusionPolicy
from tests.support.cases import make_layer

if TYPE_CHECKING:
    from foldmoe.planner.policy import Fold


def main(rank: int, port: int, fold: Fold) -> None:
    """Tensor parallelism of two, over gloo."""
    plugin.register()
    config = VllmConfig()
    config.parallel_config.tensor_parallel_size = 2
    with set_current_vllm_config(config):
        distributed.init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        distributed.initialize_model_parallel(2)
        _load("first")
        plugin.record().policy = FusionPolicy(fold)
        _load("second")
    distributed.destroy_model_parallel()
    distributed.destroy_distributed_environment()


def _load(name: str) -> None:
    from tests.vllm.factory import EXPERTS, HIDDEN, SHARED, WIDTH, SharedMLP, build

    routed, shared = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED, HIDDEN)
    try:
        build(routed, SharedMLP(shared), name)
        print(f"{name} loaded as rank {plugin.record().rank} of {plugin.record().world_size}")
    except PlanMismatchError as error:
        print(f"{name} stopped: {error}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])  # type: ignore[arg-type]
