"""The two classes that vLLM builds instead of its own, and the one decision about each layer.

vLLM builds the routed experts first and the runner, which knows the shared expert, after. Parameters are therefore made
for folding wherever the routed experts allow it, and made anew by vLLM's own method where the rest does not.
"""

from __future__ import annotations

from functools import wraps
from importlib.util import find_spec
from inspect import signature
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe import MoERunner, RoutedExperts
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

from foldmoe.formats import Format
from foldmoe.integrations.vllm import plugin, refusals
from foldmoe.integrations.vllm.method import Claimed, FoldedMethod
from foldmoe.integrations.vllm.raw import RawExperts
from foldmoe.integrations.vllm.record import Entry
from foldmoe.integrations.vllm.reloading import INSTEAD
from foldmoe.integrations.vllm.shared import SharedMLP
from foldmoe.integrations.vllm.stored import Storage, routed_storage
from foldmoe.moe import Activation, ExpertSpec, LayerSpec, Placement
from foldmoe.planner import LayerPlan, plan_layer

_CPU_ROUTERS = "vllm.model_executor.layers.fused_moe.router.cpu_router"


class FoldedRoutedExperts(RoutedExperts):  # type: ignore[misc]
    """vLLM's container of routed experts, its parameters as stored where the layer may fold."""

    quant_method: Any
    reasons: tuple[str, ...] = ()
    """Why the routed experts stay with vLLM."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self._named = named  # asked for by _get_quant_method, which vLLM calls from within its own constructor
        super().__init__(*arguments, **named)

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> Any:
        raw = self._raw(prefix, quant_config, moe_config)
        if isinstance(raw, RawExperts):
            return FoldedMethod(moe_config, raw)
        self.reasons = raw
        return super()._get_quant_method(prefix, quant_config, moe_config)

    def _raw(self, prefix: str, quant_config: Any, moe: Any) -> RawExperts | tuple[str, ...]:
        if plugin.record().policy.fold == "stock":
            return ("FOLDMOE_FOLD=stock leaves vLLM's own layer in place",)
        reasons = refusals.of_routed(moe, get_current_vllm_config(), self._named)
        if self.expert_map_manager.num_fused_shared_experts:
            reasons += ("vLLM itself put the shared expert into a routed slot",)
        skipped = quant_config is not None and is_layer_skipped(
            prefix,
            getattr(quant_config, "ignored_layers", None) or [],
            quant_config.packed_modules_mapping,
            **_matching(quant_config),
        )
        storage = routed_storage(quant_config, skipped)
        if isinstance(storage, str):
            reasons += (storage,)
        if reasons or not isinstance(storage, Storage):
            return reasons
        parallel = moe.moe_parallel_config
        return RawExperts(
            prefix,
            storage,
            moe.num_local_experts,
            moe.hidden_dim,
            moe.intermediate_size // parallel.tp_size,
            parallel.tp_rank,
            parallel.tp_size,
            self.params_dtype,
        )

    def weight_loader(
        self,
        param: nn.Parameter,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> bool | None:
        """Load one expert's tensor, or a stack ``[E, ...]`` of them."""
        method = self.quant_method
        if not isinstance(method, FoldedMethod):
            done: bool | None = super().weight_loader(
                param, loaded_weight, weight_name, shard_id, expert_id, return_success
            )
            return done
        if method.layer is not None:
            raise RuntimeError(f"{self.layer_name}: {weight_name} came after the layer was packed; {INSTEAD}")
        stacked = loaded_weight.dim() == 3
        found = False
        for number, tensor in enumerate(loaded_weight if stacked else loaded_weight[None], start=expert_id):
            local = self._map_global_expert_id_to_local_expert_id(number)
            if local != -1:
                method.raw.load(param, tensor, weight_name, shard_id, local)
                found = True
        return found if return_success else None

    weight_loader.supports_moe_loading = True  # type: ignore[attr-defined]  # vLLM's models ask for it

    def back_to_vllm(self) -> None:
        """Give the layer to vLLM's own method, parameters made anew."""
        method, moe = self.quant_method, self.moe_config
        for name in method.raw.names():
            del self._parameters[name]
        self.quant_method = super()._get_quant_method(self.layer_name, self.quant_config, moe)
        hidden, width = self.quant_method.maybe_roundup_sizes(
            moe.hidden_dim, moe.intermediate_size_per_partition, moe.in_dtype, moe.moe_parallel_config
        )
        self.hidden_size = moe.hidden_dim = hidden
        self.intermediate_size_per_partition = moe.intermediate_size_per_partition = width
        sizes = {"hidden_size": hidden, "intermediate_size_per_partition": width}
        self.quant_method.create_weights(layer=self, **{**method.create, **sizes})


class FoldedRunner(MoERunner):  # type: ignore[misc]
    """vLLM's runner; a folded layer's shared expert is kept from it."""

    def __init__(self, **named: Any) -> None:
        routed, moe = named["routed_experts"], named["moe_config"]
        entry = plugin.record().enter(Entry(named["layer_name"], owner=ref(self)))
        if isinstance(routed.quant_method, FoldedMethod):
            decided = _decide(routed, moe, named)
            if isinstance(decided, LayerPlan):
                entry.plan = decided
                _hand_over(routed.quant_method, entry, named)
            else:
                entry.reasons = decided
                routed.back_to_vllm()
        else:
            known = isinstance(routed, FoldedRoutedExperts)
            entry.reasons = routed.reasons if known else (f"vLLM runs it with {type(routed).__name__}",)
        super().__init__(**named)
        stream = getattr(self.shared_experts, "_stream", None)
        entry.shared_stream = None if self.shared_experts is None else stream is not None
        self.foldmoe_engine = get_current_vllm_config()
        self.foldmoe_loaded = Loaded(entry, self.foldmoe_engine)
        self.foldmoe_first = len(plugin.record().entries) == 1
        plugin.mark_compiled_code(self.foldmoe_engine)

    def _forward_impl(self, *arguments: Any, **named: Any) -> Any:
        if self.foldmoe_first and not torch.compiler.is_compiling():
            plugin.note_forward(self.foldmoe_engine)
        return super()._forward_impl(*arguments, **named)


def watch() -> None:
    """Have runners of vLLM's subclasses be named too: vLLM builds those itself, so their layers stay with it."""
    stock = MoERunner.__init__

    @wraps(stock)
    def build(self: Any, *arguments: Any, **named: Any) -> None:
        if isinstance(self, FoldedRunner):
            stock(self, *arguments, **named)
            return
        given = signature(stock).bind(self, *arguments, **named).arguments
        routed = given["routed_experts"]
        reasons = getattr(routed, "reasons", ()) or (f"vLLM runs it with {type(self).__name__}",)
        entry = plugin.record().enter(Entry(given["layer_name"], reasons=reasons, owner=ref(self)))
        if isinstance(routed.quant_method, FoldedMethod):
            routed.back_to_vllm()
        stock(self, *arguments, **named)
        self.foldmoe_loaded = Loaded(entry, get_current_vllm_config())

    MoERunner.__init__ = build


def _matching(quant_config: Any) -> dict[str, Any]:
    """How names of ignored layers match, for versions that know more than one way."""
    mode = getattr(quant_config, "ignored_layers_match_mode", None)
    return {} if mode is None else {"match_mode": mode}


def _decide(routed: FoldedRoutedExperts, moe: Any, named: dict[str, Any]) -> LayerPlan | tuple[str, ...]:
    """The plan, or why the layer stays with vLLM."""
    reasons = refusals.of_runner(moe, named, cpu_routers=find_spec(_CPU_ROUTERS) is not None)
    if reasons:
        return reasons
    shared = SharedMLP.of(named["shared_experts"])
    if isinstance(shared, str):
        return (shared,)
    raw: RawExperts = routed.quant_method.raw
    parallel = moe.moe_parallel_config
    placement = Placement(parallel.ep_size, parallel.ep_rank, parallel.tp_size, parallel.tp_rank)
    spec = _spec(raw, shared, moe, placement)
    plan = plan_layer(spec, plugin.record().policy, moe.device, placement)
    return plan.reasons if plan.arm == "stock" else plan


def _spec(raw: RawExperts, shared: SharedMLP, moe: Any, placement: Placement) -> LayerSpec:
    """The layer's facts. The shared expert counts as wide as this rank's part of it, times the routed experts' cut."""
    storage, local = raw.storage, shared.spec()
    scale_bytes = 0 if storage.scale_dtype is None else storage.scale_dtype.itemsize
    whole = ExpertSpec(
        moe.num_experts,
        moe.intermediate_size,
        storage.format,
        e8m0_scales=scale_bytes == 1,
        float_bytes=scale_bytes if scale_bytes > 1 else 0,
        float16=storage.format is Format.BF16 and raw.float_dtype == torch.float16,
    )
    parts = placement.tp_size
    whole_shared = ExpertSpec(
        1,
        local.width * parts,
        local.format,
        local.block,
        e8m0_scales=local.e8m0_scales,
        float_bytes=local.float_bytes,
        float16=local.float16,
    )
    quantised = "bf16" not in (storage.format.value, local.format.value)
    return LayerSpec(
        raw.layer,
        raw.hidden,
        moe.experts_per_token,
        whole,
        whole_shared,
        Activation(moe.swiglu_limit),
        shared.activation,
        activations="fp8" if quantised and storage.dynamic else "bf16",
        shared_gate=shared.expert_gate is not None,
    )


def _hand_over(method: FoldedMethod, entry: Entry, named: dict[str, Any]) -> None:
    """Move the shared expert and the routed scale from the runner into the folded layer."""
    shared = SharedMLP.of(named["shared_experts"])
    assert isinstance(shared, SharedMLP)
    shared.claim(Claimed(entry))
    method.entry, method.shared = entry, shared
    method.routed_scale = float(named.get("routed_scaling_factor", 1.0))
    named["shared_experts"] = None
    named["routed_scaling_factor"] = 1.0  # the runner would scale the sum, shared part included


class Loaded(nn.Module):
    """A child without parameters that vLLM visits after loading, as it does every module with a ``quant_method``."""

    def __init__(self, entry: Entry, engine: Any) -> None:
        super().__init__()
        self.quant_method = _Reporter(entry, engine)


class _Reporter(QuantizeMethodBase):  # type: ignore[misc]
    def __init__(self, entry: Entry, engine: Any) -> None:
        self.entry, self.engine = entry, engine

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        """Nothing to create."""

    def apply(self, layer: Any, *arguments: Any, **named: Any) -> Tensor:
        raise RuntimeError(f"{self.entry.name}: this child only hears that loading has ended; no model calls it")

    def process_weights_after_loading(self, layer: Any) -> None:
        self.entry.loaded = True
        plugin.note_loaded(self.engine)
