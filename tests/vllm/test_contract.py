"""Every name, signature and attribute of vLLM's that the plugin touches, in the source of each version at hand."""

from __future__ import annotations

import ast

import pytest

from tests.vllm.sources import VARIABLE, Source, at_hand

MOE = "model_executor/layers/fused_moe"
QUANTIZATION = "model_executor/layers/quantization"
SOURCES = at_hand()

METHOD = {
    "create_weights",
    "process_weights_after_loading",
    "apply",
    "get_fused_moe_quant_config",
    "maybe_roundup_sizes",
    "supports_internal_mk",
}
"""What ``FoldedMethod`` defines; vLLM may ask a subclass for nothing else."""


@pytest.fixture(params=list(SOURCES) or [None])
def vllm(request: pytest.FixtureRequest) -> Source:
    if request.param is None:
        pytest.skip(f"no vLLM is installed here and {VARIABLE} names none; make test-vllm-sources fetches the wheels")
    return SOURCES[request.param]


@pytest.mark.parametrize(
    ("file", "names"),
    [
        (f"{MOE}/__init__.py", {"MoERunner", "RoutedExperts", "FusedMoEMethodBase"}),
        (f"{QUANTIZATION}/base_config.py", {"QuantizeMethodBase"}),
        (f"{QUANTIZATION}/utils/quant_utils.py", {"is_layer_skipped"}),
        ("distributed/parallel_state.py", {"get_dp_group", "get_ep_group", "get_world_group"}),
        ("config/__init__.py", {"get_current_vllm_config"}),
        ("forward_context.py", {"get_forward_context"}),
        ("plugins/__init__.py", {"vllm.general_plugins"}),
    ],
)
def test_names_are_there(vllm: Source, file: str, names: set[str]) -> None:
    assert names <= vllm.exports(file)


@pytest.mark.parametrize(
    ("file", "name", "first"),
    [
        (f"{MOE}/routed_experts.py", "RoutedExperts.__init__", ["layer_name", "params_dtype", "moe_config"]),
        (f"{MOE}/routed_experts.py", "RoutedExperts._get_quant_method", ["prefix", "quant_config", "moe_config"]),
        (
            f"{MOE}/routed_experts.py",
            "RoutedExperts.weight_loader",
            ["param", "loaded_weight", "weight_name", "shard_id", "expert_id", "return_success"],
        ),
        (f"{MOE}/routed_experts.py", "RoutedExperts._map_global_expert_id_to_local_expert_id", ["expert_id"]),
        (
            f"{MOE}/fused_moe_method_base.py",
            "FusedMoEMethodBase.apply",
            ["layer", "x", "topk_weights", "topk_ids", "shared_experts", "shared_experts_input"],
        ),
        (
            f"{MOE}/fused_moe_method_base.py",
            "FusedMoEMethodBase.maybe_roundup_sizes",
            ["hidden_size", "intermediate_size_per_partition", "act_dtype", "moe_parallel_config"],
        ),
        (f"{MOE}/fused_moe_method_base.py", "FusedMoEMethodBase.__init__", ["moe"]),
        (f"{MOE}/fused_moe_method_base.py", "FusedMoEMethodBase.get_fused_moe_quant_config", ["layer"]),
        (f"{QUANTIZATION}/base_config.py", "QuantizeMethodBase.process_weights_after_loading", ["layer"]),
        (
            f"{QUANTIZATION}/utils/quant_utils.py",
            "is_layer_skipped",
            ["prefix", "ignored_layers", "fused_mapping"],
        ),
        (
            "distributed/parallel_state.py",
            "GroupCoordinator.dispatch",
            ["hidden_states", "topk_weights", "topk_ids", "is_sequence_parallel"],
        ),
        ("distributed/parallel_state.py", "GroupCoordinator.combine", ["hidden_states", "is_sequence_parallel"]),
    ],
)
def test_arguments_come_in_this_order(vllm: Source, file: str, name: str, first: list[str]) -> None:
    assert vllm.arguments(file, name)[: len(first)] == first


def test_the_factory_hands_the_runner_what_is_moved(vllm: Source) -> None:
    """By keyword, so that the plugin can take the shared expert and the routed scale out of them."""
    asked = {"layer_name", "moe_config", "router", "routed_experts", "shared_experts", "shared_expert_gate"}
    asked |= {"routed_input_transform", "routed_output_transform", "routed_scaling_factor"}
    assert asked <= set(vllm.arguments(f"{MOE}/runner/moe_runner.py", "MoERunner.__init__"))
    factory = "FusedMoEFactory" if "FusedMoEFactory" in vllm.exports(f"{MOE}/layer.py") else "FusedMoE"
    assert asked <= vllm.keywords(f"{MOE}/layer.py", factory, "runner_cls")
    assert "apply_router_weight_on_input" in vllm.keywords(f"{MOE}/layer.py", factory, "routed_experts_cls")


def test_the_layer_knows_its_facts_before_it_asks_for_a_method(vllm: Source) -> None:
    known = vllm.set_before(f"{MOE}/routed_experts.py", "RoutedExperts.__init__", "_get_quant_method")
    assert {"layer_name", "moe_config", "quant_config", "expert_map_manager", "params_dtype"} <= known


def test_a_method_has_all_that_vllm_asks_of_it(vllm: Source) -> None:
    asked = vllm.abstract(f"{MOE}/fused_moe_method_base.py", "FusedMoEMethodBase")
    asked |= vllm.abstract(f"{QUANTIZATION}/base_config.py", "QuantizeMethodBase")
    assert asked <= METHOD
    assert {"supports_internal_mk", "is_monolithic"} <= vllm.attributes(
        f"{MOE}/fused_moe_method_base.py", "FusedMoEMethodBase"
    )


@pytest.mark.parametrize(
    ("file", "name", "attributes"),
    [
        (
            f"{MOE}/config.py",
            "FusedMoEConfig",
            "num_experts num_local_experts num_logical_experts experts_per_token hidden_dim intermediate_size device "
            "intermediate_size_per_partition in_dtype activation has_bias is_lora_enabled swiglu_limit swiglu_alpha "
            "swiglu_beta is_sequence_parallel moe_parallel_config dp_size",
        ),
        (
            f"{MOE}/config.py",
            "FusedMoEParallelConfig",
            "tp_size tp_rank ep_size ep_rank dp_size pcp_size use_ep enable_eplb all2all_backend",
        ),
        (f"{MOE}/expert_map_manager.py", "ExpertMapManager", "num_fused_shared_experts"),
        (f"{MOE}/runner/moe_runner.py", "MoERunner", "shared_experts _forward_impl routed_scaling_factor"),
        (f"{MOE}/runner/shared_experts.py", "SharedExperts", "_stream"),
        ("config/parallel.py", "ParallelConfig", "enable_dbo ubatch_size expert_placement_strategy enable_elastic_ep"),
        ("config/offload.py", "UVAOffloadConfig", "cpu_offload_gb"),
        ("config/offload.py", "PrefetchOffloadConfig", "offload_group_size"),
        ("config/offload.py", "OffloadConfig", "uva prefetch"),
        ("config/cache.py", "CacheConfig", "num_gpu_blocks"),
        ("config/load.py", "LoadConfig", "load_format"),
        (
            "config/vllm.py",
            "VllmConfig",
            "additional_config parallel_config cache_config load_config model_config offload_config "
            "weight_transfer_config",
        ),
        ("config/model.py", "ModelConfig", "enable_sleep_mode"),
        ("v1/worker/gpu_worker.py", "Worker", "reload_weights"),
        ("forward_context.py", "ForwardContext", "dp_metadata"),
        ("forward_context.py", "DPMetadata", "get_chunk_sizes_across_dp_rank"),
        ("model_executor/layers/activation.py", "SiluAndMulWithClamp", "swiglu_limit alpha beta"),
        (
            f"{QUANTIZATION}/fp8.py",
            "Fp8Config",
            "is_checkpoint_fp8_serialized activation_scheme weight_block_size ignored_layers",
        ),
        ("models/deepseek_v4/quant_config.py", "DeepseekV4FP8Config", "expert_dtype is_scale_e8m0 moe_quant_algo"),
        ("model_executor/custom_op.py", "PluggableLayer", "register_oot"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value and "/" not in value else "",
)
def test_attributes_are_there(vllm: Source, file: str, name: str, attributes: str) -> None:
    assert set(attributes.split()) - vllm.attributes(file, name) == set()


def test_the_worker_on_cpus_is_a_gpu_worker(vllm: Source) -> None:
    """Its ``reload_weights`` is the one that is guarded."""
    worker = vllm.node("v1/worker/cpu_worker.py", "CPUWorker")
    assert isinstance(worker, ast.ClassDef)
    assert [ast.unparse(base) for base in worker.bases] == ["Worker"]
    assert "reload_weights" not in vllm.attributes("v1/worker/cpu_worker.py", "CPUWorker")


def test_shared_linears_hold_what_is_taken_from_them(vllm: Source) -> None:
    """``weight``, ``weight_scale_inv`` and the block; DeepSeek-V4 names routed scales ``weight_scale``."""
    words = _strings(vllm.node(f"{QUANTIZATION}/fp8.py", "Fp8LinearMethod.create_weights"))
    assert {"weight", "weight_scale_inv"} <= words
    assert "weight_block_size" in vllm.attributes(f"{QUANTIZATION}/fp8.py", "Fp8LinearMethod")
    routed = _strings(vllm.node(f"{QUANTIZATION}/mxfp4.py", "Mxfp4MoEMethod.create_weights"))
    assert {"w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"} <= routed


def test_weights_are_processed_module_by_module(vllm: Source) -> None:
    """A claimed linear, the experts and the child that reports are all found by their ``quant_method``."""
    source = ast.unparse(vllm.node("model_executor/model_loader/utils.py", "process_weights_after_loading"))
    assert "named_modules()" in source
    assert "getattr(module, 'quant_method', None)" in source
    assert "isinstance(quant_method, QuantizeMethodBase)" in source


def _strings(node: ast.AST) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
