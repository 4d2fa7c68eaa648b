"""Why a layer stays with vLLM, told from its configuration alone; plain reading, no vLLM import."""

from __future__ import annotations

from typing import Any

import torch

EXCHANGES = ("allgather_reducescatter", "naive")
"""vLLM's all-to-all backends whose dispatch is an all-gather and whose combine is a reduce-scatter."""

PLAIN_ROUTERS = ("GroupedTopKRouter", "CustomRoutingRouter", "RoutingSimulatorRouter")
"""vLLM's routers that are torch expressions in every version."""


def of_routed(moe: Any, engine: Any, routed: dict[str, Any]) -> tuple[str, ...]:
    """What stands against the routed experts.

    Args:
        moe: vLLM's ``FusedMoEConfig``.
        engine: vLLM's ``VllmConfig``.
        routed: keyword arguments of ``RoutedExperts``.
    """
    parallel, found = moe.moe_parallel_config, []
    if moe.is_lora_enabled:
        found.append("LoRA is on: adapters attach to vLLM's own experts")
    if parallel.enable_eplb or moe.num_experts != moe.num_logical_experts:
        found.append("expert load balancing (EPLB) moves experts between ranks at run time")
    if engine.parallel_config.enable_elastic_ep:
        found.append("elastic expert parallelism changes the ranks at run time")
    if engine.parallel_config.enable_dbo or engine.parallel_config.ubatch_size > 1:
        found.append("dual-batch overlap (DBO) or microbatches split a batch between streams")
    if parallel.pcp_size > 1:
        found.append("prefill context parallelism gathers tokens in an order that is not known here")
    if moe.is_sequence_parallel:
        found.append("sequence parallelism splits one rank's tokens over its tensor-parallel ranks")
    if _offloads(engine):
        found.append("weights are offloaded to the CPU; folded weights stay on the GPU")
    if parallel.use_ep and engine.parallel_config.expert_placement_strategy != "linear":
        found.append(f"experts are placed {engine.parallel_config.expert_placement_strategy}, not in contiguous ranges")
    if parallel.dp_size > 1 and parallel.all2all_backend not in EXCHANGES:
        found.append(
            f"all2all backend {parallel.all2all_backend} has dispatch and combine of its own; "
            "--all2all-backend allgather_reducescatter folds"
        )
    if moe.has_bias:
        found.append("the experts have biases")
    found += _activation(moe)
    if routed.get("apply_router_weight_on_input"):
        found.append("routing weights multiply the input, not the output")
    found += _new_weights(engine)
    if getattr(engine.load_config, "load_format", "auto") == "ipc_weight_cache":
        found.append("weights come already processed from another process")
    return tuple(found)


def _offloads(engine: Any) -> bool:
    """``--cpu-offload-gb`` and ``--offload-group-size``."""
    offload = engine.offload_config
    return bool(offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size)


def _new_weights(engine: Any) -> list[str]:
    """What a server may be told at run time; folded weights are packed once."""
    found = []
    if getattr(getattr(engine, "model_config", None), "enable_sleep_mode", False):
        found.append("sleep mode may drop weights and load them again; folded layers take theirs once")
    if getattr(engine, "weight_transfer_config", None) is not None:
        found.append("weights are sent to the running server (weight transfer); folded layers take theirs once")
    return found


def _activation(moe: Any) -> list[str]:
    name = getattr(moe.activation, "value", moe.activation)
    if name != "silu":
        return [f"the activation is {name}; only silu(gate) * up is known here"]
    if getattr(moe, "swiglu_alpha", None) not in (None, 1.0) or getattr(moe, "swiglu_beta", None) not in (None, 0.0):
        return [f"the activation has alpha {moe.swiglu_alpha} and beta {moe.swiglu_beta}"]
    return []


def of_runner(moe: Any, kwargs: dict[str, Any], *, cpu_routers: bool) -> tuple[str, ...]:
    """What stands against the layer as a whole.

    Args:
        moe: vLLM's ``FusedMoEConfig``.
        kwargs: keyword arguments of ``MoERunner``.
        cpu_routers: whether all of vLLM's routers run on a CPU; 0.25.1 has GPU kernels alone for most.
    """
    found = []
    if kwargs.get("shared_experts") is None:
        found.append("the layer has no shared expert of its own: nothing to fold")
    if kwargs.get("routed_input_transform") is not None or kwargs.get("routed_output_transform") is not None:
        found.append("routed experts work in a latent space, the shared expert does not")
    if kwargs.get("shared_expert_gate") is not None:
        found.append("vLLM fused the shared expert's gate with the router")
    router = type(kwargs.get("router")).__name__
    if torch.device(moe.device).type == "cpu" and not cpu_routers and router not in PLAIN_ROUTERS:
        found.append("this vLLM routes on CPUs inside its own experts alone")
    if router == "ZeroExpertRouter":
        found.append("the router has zero experts")
    if moe.in_dtype == torch.float16 and kwargs.get("routed_scaling_factor", 1.0) != 1.0:
        found.append("in float16 vLLM divides the residual stream by the routed scaling factor; use bfloat16")
    return tuple(found)
