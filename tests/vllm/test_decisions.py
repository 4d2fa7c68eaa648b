"""What is decided without vLLM: which versions, which layers stay with it and why."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foldmoe.formats import Format
from foldmoe.integrations.vllm import plugin, refusals, versions
from foldmoe.integrations.vllm.stored import Storage, routed_storage


@pytest.mark.parametrize("version", ["0.25.1", "0.32.0", "0.33.0", "0.33.2"])
def test_known_versions_are_taken(version: str) -> None:
    assert versions.objection(version) is None


@pytest.mark.parametrize("version", ["0.25.0", "0.25.10", "0.31.0", "0.34.0", "0.3.3", "1.0"])
def test_other_versions_are_declined_by_name(version: str) -> None:
    against = versions.objection(version)
    assert against is not None
    assert version in against
    assert "0.25.1, 0.32, 0.33" in against


def test_an_unknown_version_leaves_a_warning_and_vllm_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: "0.99.0")
    monkeypatch.setattr(plugin, "_record", None)
    with caplog.at_level(logging.WARNING, "vllm.foldmoe"):
        plugin.register()
    assert "vLLM 0.99.0 was not tried" in caplog.text
    with pytest.raises(RuntimeError, match="not registered"):
        plugin.record()


def _moe(**changes: Any) -> Any:
    parallel = {"enable_eplb": False, "pcp_size": 1, "use_ep": False, "dp_size": 1}
    parallel |= {"all2all_backend": "allgather_reducescatter"}
    own = {key: changes.pop(key) for key in list(changes) if key in parallel}
    facts = {
        "is_lora_enabled": False,
        "num_experts": 8,
        "num_logical_experts": 8,
        "is_sequence_parallel": False,
        "has_bias": False,
        "activation": SimpleNamespace(value="silu"),
        "in_dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    return SimpleNamespace(moe_parallel_config=SimpleNamespace(**{**parallel, **own}), **{**facts, **changes})


def _engine(**changes: Any) -> Any:
    offload = SimpleNamespace(
        uva=SimpleNamespace(cpu_offload_gb=changes.pop("cpu_offload_gb", 0)),
        prefetch=SimpleNamespace(offload_group_size=changes.pop("offload_group_size", 0)),
    )
    sleeps, transfer = changes.pop("enable_sleep_mode", False), changes.pop("weight_transfer_config", None)
    parallel = {"enable_elastic_ep": False, "enable_dbo": False, "ubatch_size": 0}
    parallel |= {"expert_placement_strategy": "linear"}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **changes}),
        offload_config=offload,
        cache_config=SimpleNamespace(),
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        weight_transfer_config=transfer,
        load_config=SimpleNamespace(load_format="auto"),
    )


def test_a_plain_layer_has_nothing_against_it() -> None:
    assert refusals.of_routed(_moe(), _engine(), {}) == ()
    assert (
        refusals.of_runner(_moe(), {"shared_experts": object(), "routed_scaling_factor": 2.5}, cpu_routers=True) == ()
    )


@pytest.mark.parametrize(
    ("moe", "engine", "routed", "word"),
    [
        ({"is_lora_enabled": True}, {}, {}, "LoRA"),
        ({"enable_eplb": True}, {}, {}, "EPLB"),
        ({"num_experts": 10}, {}, {}, "EPLB"),
        ({}, {"enable_dbo": True}, {}, "DBO"),
        ({}, {"ubatch_size": 2}, {}, "microbatches"),
        ({}, {"enable_elastic_ep": True}, {}, "elastic"),
        ({"pcp_size": 2}, {}, {}, "context parallelism"),
        ({"is_sequence_parallel": True}, {}, {}, "sequence parallelism"),
        ({}, {"cpu_offload_gb": 4}, {}, "offloaded"),
        ({}, {"offload_group_size": 8}, {}, "offloaded"),
        ({}, {"enable_sleep_mode": True}, {}, "sleep mode"),
        ({}, {"weight_transfer_config": object()}, {}, "weight transfer"),
        ({"use_ep": True}, {"expert_placement_strategy": "round_robin"}, {}, "round_robin"),
        ({"dp_size": 8, "all2all_backend": "deepep_low_latency"}, {}, {}, "backend deepep_low_latency has dispatch"),
        ({"dp_size": 8, "all2all_backend": "deepep_high_throughput"}, {}, {}, "backend deepep_high_throughput has"),
        ({"dp_size": 8, "all2all_backend": "pplx"}, {}, {}, "--all2all-backend allgather_reducescatter folds"),
        ({"has_bias": True}, {}, {}, "bias"),
        ({"activation": SimpleNamespace(value="gelu")}, {}, {}, "gelu"),
        ({"swiglu_alpha": 1.7}, {}, {}, "alpha 1.7"),
        ({}, {}, {"apply_router_weight_on_input": True}, "input"),
    ],
)
def test_each_obstacle_is_named(moe: dict[str, Any], engine: dict[str, Any], routed: dict[str, Any], word: str) -> None:
    moe.setdefault("swiglu_beta", None)
    (reason,) = refusals.of_routed(_moe(**moe), _engine(**engine), routed)
    assert word in reason


def test_experts_in_contiguous_ranges_do_not_need_all_to_all() -> None:
    """With tensor and expert parallelism alone no token travels, whatever the backend is called."""
    moe = _moe(use_ep=True, all2all_backend="deepep_low_latency")
    assert refusals.of_routed(moe, _engine(), {}) == ()


@pytest.mark.parametrize(
    ("kwargs", "dtype", "word"),
    [
        ({"shared_experts": None}, torch.bfloat16, "nothing to fold"),
        ({"routed_input_transform": object()}, torch.bfloat16, "latent"),
        ({"shared_expert_gate": object()}, torch.bfloat16, "gate"),
        ({"routed_scaling_factor": 2.5}, torch.float16, "bfloat16"),
    ],
)
def test_each_obstacle_of_the_runner_is_named(kwargs: dict[str, Any], dtype: torch.dtype, word: str) -> None:
    (reason,) = refusals.of_runner(_moe(in_dtype=dtype), {"shared_experts": object(), **kwargs}, cpu_routers=True)
    assert word in reason


def test_a_router_that_a_cpu_cannot_run_is_an_obstacle_there() -> None:
    class FusedTopKRouter:
        pass

    class GroupedTopKRouter:
        pass

    def found(device: str, router: object) -> tuple[str, ...]:
        kwargs = {"shared_experts": object(), "router": router}
        return refusals.of_runner(_moe(device=torch.device(device)), kwargs, cpu_routers=False)

    assert found("cuda", FusedTopKRouter()) == found("cpu", GroupedTopKRouter()) == ()
    (reason,) = found("cpu", FusedTopKRouter())
    assert "routes on CPUs inside its own experts" in reason


def _config(name: str, **facts: Any) -> Any:
    stated = {"is_checkpoint_fp8_serialized": True, "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return SimpleNamespace(get_name=lambda: name, **{**stated, **facts})


def test_stored_formats_are_read_from_vllms_configuration() -> None:
    assert routed_storage(None, False) == Storage(Format.BF16)
    assert routed_storage(_config("fp8"), True) == Storage(Format.BF16)
    fp8 = routed_storage(_config("fp8"), False)
    assert fp8 == Storage(Format.FP8_128x128, "weight_scale_inv", torch.float32, True)
    v4 = routed_storage(_config("deepseek_v4_fp8", expert_dtype="fp4"), False)
    assert v4 == Storage(Format.MXFP4, "weight_scale", torch.uint8, True)
    base = routed_storage(_config("deepseek_v4_fp8", expert_dtype="fp8", is_scale_e8m0=False), False)
    assert base == fp8
    assert routed_storage(_config("fp8", is_scale_e8m0=True), False) == fp8, "vLLM's own layers hold float32 scales too"
    small = routed_storage(_config("fp8", weight_block_size=[32, 32]), False)
    assert isinstance(small, Storage)
    assert small.format is Format.FP8_32x32


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (_config("awq"), "awq"),
        (_config("fp8", weight_block_size=None), "None"),
        (_config("fp8", weight_block_size=[64, 64]), "64"),
        (_config("fp8", is_checkpoint_fp8_serialized=False), "while loading"),
        (_config("deepseek_v4_fp8", expert_dtype="fp4", moe_quant_algo="NVFP4"), "NVFP4"),
        (_config("fp8", store_dtype="mxfp4"), "stored as mxfp4"),
        (_config("fp8", online_quantization_config=object()), "--quantization-config"),
    ],
)
def test_other_formats_stay_with_vllm(config: Any, word: str) -> None:
    reason = routed_storage(config, False)
    assert isinstance(reason, str)
    assert word in reason
