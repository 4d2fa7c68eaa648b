"""What runs a folded layer: vLLM's ``FusedMoEMethodBase``, with the shared expert inside."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

from foldmoe.integrations.vllm import ranks
from foldmoe.integrations.vllm.reloading import INSTEAD
from foldmoe.integrations.vllm.shared import without_zero_tail, zero_tail
from foldmoe.layer import FoldedMoE
from foldmoe.planner import capability

if TYPE_CHECKING:
    from foldmoe.integrations.vllm.raw import RawExperts
    from foldmoe.integrations.vllm.record import Entry
    from foldmoe.integrations.vllm.shared import SharedMLP
    from foldmoe.planner import LayerPlan

_methods: WeakValueDictionary[int, FoldedMethod] = WeakValueDictionary()
_handles = count()


class FoldedMethod(FusedMoEMethodBase):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """Takes the checkpoint's tensors as they are, packs them once, runs routed and shared experts in one call.

    Args:
        moe: vLLM's configuration of the layer.
        raw: parameters before packing.
        create: vLLM's arguments of ``create_weights``, kept for a layer that goes back to vLLM.
    """

    def __init__(self, moe: Any, raw: RawExperts) -> None:
        super().__init__(moe)
        self.raw = raw
        self.create: dict[str, Any] = {}
        self.entry: Entry | None = None
        self.shared: SharedMLP | None = None
        self.routed_scale = 1.0
        self.layer: FoldedMoE | None = None
        self.exchanges = moe.dp_size > 1
        self.handle = next(_handles)
        _methods[self.handle] = self

    @property
    def supports_internal_mk(self) -> bool:
        """True: tokens of other ranks are gathered here, after the router, and not by vLLM before it."""
        return True

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, act_dtype: Any, moe_parallel_config: Any
    ) -> tuple[int, int]:
        """Sizes stay as they are."""
        return hidden_size, intermediate_size_per_partition

    def create_weights(self, layer: Any, **arguments: Any) -> None:
        """Register parameters of the checkpoint's own shapes."""
        self.create = arguments
        self.raw.register(layer, arguments["weight_loader"])

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: no kernel of vLLM's runs this layer."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Pack; the parameters are gone afterwards, here and in the shared MLP."""
        if self.layer is not None:
            raise RuntimeError(f"{self.raw.layer}: a folded layer takes its weights once; {INSTEAD}")
        assert self.shared is not None
        assert self.entry is not None
        plan = self.entry.plan
        assert plan is not None
        routed, shared = self.raw.take(layer), self.shared.take(self.raw.dummy)
        if plan.strategy == "slot":  # as wide as a routed expert, whatever of it is used
            self.entry.slot_zeros = _slot_nbytes(plan, zero_tail(shared))
        else:
            shared = without_zero_tail(shared)
        self.layer = FoldedMoE(
            routed,
            shared,
            plan=plan,
            consume=True,
        )
        # Packing may have found another backend.
        self.entry.packed, self.entry.plan = ref(self.layer), _with_shared_width(self.layer.plan, shared.width)

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any = None,
        shared_experts_input: Tensor | None = None,
    ) -> Tensor:
        """x ``[T, H]``, weights float32 and ids ``[T, K]`` to ``[T, H]``, shared part included."""
        if torch.compiler.is_compiling():
            y: Tensor = torch.ops.foldmoe.vllm_layer(x, topk_weights, topk_ids, self.handle)
            return y
        return self.run(x, topk_weights, topk_ids)

    def run(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """:meth:`apply` behind the torch op."""
        if self.layer is None:
            raise RuntimeError(f"{self.raw.layer}: called before its weights were loaded")
        gate, rows = self._gate(x), None
        if self.exchanges:
            x, weights, ids, rows = ranks.dispatch(x, weights, ids)
            if gate is not None:  # other ranks' rows get no shared part here, whatever stands in theirs
                own, gate = gate, gate.new_zeros(len(x))
                gate[slice(*rows)] = own
        y = self.layer(x, ids, weights, shared_weights=gate, routed_scale=self.routed_scale, shared_rows=rows)
        return ranks.combine(y) if self.exchanges else y

    def _gate(self, x: Tensor) -> Tensor | None:
        """``[T]`` float32 weight of the shared expert, for models that have a gate for it."""
        if self.shared is None or self.shared.expert_gate is None:
            return None
        logits = self.shared.expert_gate(x)
        logits = logits[0] if isinstance(logits, tuple) else logits
        return torch.sigmoid(logits.flatten().to(torch.float32))


def _with_shared_width(plan: LayerPlan, width: int) -> LayerPlan:
    """The plan with the bytes of a shared part that is only ``width`` wide on this rank; ranks still agree on it."""
    local = plan.spec.local(plan.placement)
    assert local.shared is not None
    if plan.strategy == "slot" or width == local.shared.width:
        return plan
    held = replace(local, shared=replace(local.shared, width=width))
    return replace(plan, bytes_after=capability.find(plan.backend).packed_nbytes(held))


def _slot_nbytes(plan: LayerPlan, columns: int) -> int:
    """Bytes of ``columns`` columns of a slot's width, stored as routed experts are."""
    routed = plan.spec.local(plan.placement).routed
    return routed.nbytes(plan.spec.hidden) * columns // routed.width


class Claimed(QuantizeMethodBase):  # type: ignore[misc]
    """In place of the shared linears' own method: their weights move into the folded layer, vLLM repacks nothing."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    def create_weights(self, layer: Any, *arguments: Any, **named: Any) -> None:
        raise RuntimeError(f"{self.entry.name}: a folded layer takes its weights once; {INSTEAD}")

    def process_weights_after_loading(self, layer: Any) -> None:
        """Nothing the first time: the folded layer reads the loaded tensors as they are.

        Raises:
            RuntimeError: new weights, after the layer was packed.
        """
        if self.entry.packed is not None and layer._parameters:  # a reload registers them again
            raise RuntimeError(
                f"{self.entry.name}: new weights came for the shared expert after the layer was packed; {INSTEAD}"
            )

    def apply(self, layer: Any, *arguments: Any, **named: Any) -> Tensor:
        raise RuntimeError(
            f"{self.entry.name}: the shared expert runs inside the folded layer, its own module was called"
        )


@torch.library.custom_op("foldmoe::vllm_layer", mutates_args=())
def vllm_layer(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, handle: int) -> Tensor:
    """The layer behind ``handle``; see :meth:`FoldedMethod.run`."""
    return _methods[handle].run(x, topk_weights, topk_ids)


@vllm_layer.register_fake
def _(x: Tensor, topk_weights: Tensor, topk_ids: Tensor, handle: int) -> Tensor:
    return x.new_empty(x.shape)  # contiguous, whatever x is
