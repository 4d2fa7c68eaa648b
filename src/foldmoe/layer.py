"""``FoldedMoE``: weights in, y out."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foldmoe.backends import Call, Unsupported, get
from foldmoe.backends.base import run_planned
from foldmoe.checkpoint.writer import layer_tensors
from foldmoe.formats.checks import nan_positions
from foldmoe.moe import Activation, ExpertSpec, ExpertWeights, LayerSpec, Placement
from foldmoe.moe.merge import append_expert, slot_weights
from foldmoe.planner import FusionPolicy, LayerPlan, plan_layer
from foldmoe.planner.decide import without_backend
from foldmoe.runtime import op

if TYPE_CHECKING:
    from foldmoe.backends import PackedLayer
    from foldmoe.checkpoint import MoELayer

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class FoldedMoE(torch.nn.Module):
    """One MoE layer whose shared expert runs with the routed experts.

    For inference: no gradient passes through it. The packed weights are no parameters: they stay on the device they
    came on, and ``.to()`` does not move them.

    Args:
        routed: this rank's routed experts.
        shared: the shared expert, or None.
        activation, shared_activation: gated activations, those of the plan where there is one; the shared one defaults
            to the routed one.
        policy: what is asked for; the default folds as stored wherever possible.
        placement: where this rank stands; ``routed`` and ``shared`` are its shard already.
        consume: the backend may reuse the weights' storage; do not touch them afterwards.
        plan: a decision made before (by :func:`foldmoe.plan_checkpoint`, say); made here if None. It holds the policy
            and the placement already.
        name, top_k, num_experts: facts for the plan and for messages, where weights cannot tell: the layer's name,
            routed experts a token, routed experts over all ranks.

    Raises:
        ValueError: weights of different hidden sizes or on different devices, NaN in their scales, a plan of another
            layer, or a layer that no backend of ours runs.
    """

    def __init__(
        self,
        routed: ExpertWeights,
        shared: ExpertWeights | None = None,
        *,
        activation: Activation | None = None,
        shared_activation: Activation | None = None,
        policy: FusionPolicy | None = None,
        placement: Placement | None = None,
        consume: bool = False,
        plan: LayerPlan | None = None,
        name: str = "layer",
        top_k: int | None = None,
        num_experts: int | None = None,
    ) -> None:
        super().__init__()
        if plan is not None:
            activation, shared_activation = _planned(plan, activation, shared_activation)
        activation = activation or Activation()
        shared_activation = shared_activation or activation
        self._check_weights(name, routed, shared)
        if plan is None:
            placement = placement or Placement()
            spec = _spec(name, routed, shared, activation, shared_activation, placement, top_k, num_experts)
            plan = plan_layer(spec, policy, routed.device, placement)
        elif policy is not None or placement not in (None, plan.placement):
            raise ValueError(f"{plan.layer}: the plan holds policy and placement; give those, or the plan")
        if plan.arm == "stock":
            raise ValueError(f"{plan.layer}: planned to stay with the engine's own layer: {'; '.join(plan.reasons)}")
        self.plan = plan
        self.device = routed.device
        self.top_k = plan.spec.top_k
        self.experts = plan.placement.experts(plan.spec.routed.count)
        if len(self.experts) != routed.num_experts:
            raise ValueError(
                f"{name}: rank holds {routed.num_experts} experts, its placement says {len(self.experts)}; give this "
                "rank's part alone as routed, and num_experts where ranks hold unequal parts"
            )
        self._check_plan(routed, shared)
        if plan.strategy == "slot" and shared is not None:
            extra = slot_weights(shared, requantize=plan.requantize, padded_width=plan.padded_width)
            routed, shared = append_expert(routed, extra), None
        self.packed: PackedLayer = self._pack(routed, shared, activation, shared_activation, consume)
        self.packed.route_share = len(self.experts) / max(1, plan.spec.routed.count)
        self.stored_as: MoELayer | None = None
        """Names in the checkpoint that the layer was loaded from."""
        self._handle = op.register(self)

    @staticmethod
    def _check_weights(name: str, routed: ExpertWeights, shared: ExpertWeights | None) -> None:
        for which, experts in (("routed", routed), ("shared", shared)):
            for role, tensor in (("gate_up", experts.gate_up), ("down", experts.down)) if experts else ():
                if tensor.scales is not None:
                    found = nan_positions(tensor.scales, e8m0_scales=tensor.e8m0_scales)
                    if len(found):
                        raise ValueError(
                            f"{name}: {len(found)} scales of {which} {role} are NaN, the first at {found[0].tolist()}; "
                            "the checkpoint is damaged or was exported wrongly"
                        )
        if shared is None:
            return
        if shared.num_experts != 1:
            raise ValueError(f"{name}: expected one shared expert, found {shared.num_experts}")
        if shared.hidden != routed.hidden:
            raise ValueError(
                f"{name}: routed experts have hidden size {routed.hidden}, the shared expert {shared.hidden}"
            )
        if shared.device != routed.device:
            raise ValueError(f"{name}: routed experts are on {routed.device}, the shared expert on {shared.device}")

    def _check_plan(self, routed: ExpertWeights, shared: ExpertWeights | None) -> None:
        spec, parts = self.plan.spec, self.plan.placement.tp_size
        if (shared is None) != (spec.shared is None):
            planned, found = ("with", "none") if shared is None else ("without", "one")
            said = f"planned {planned} a shared expert, found {found}"
            raise ValueError(f"{self.plan.layer}: {said}; give weights and plan of one layer")
        if shared is not None and spec.shared is not None:
            width = spec.shared.width // parts
            if shared.format is not spec.shared.format or shared.width > width:  # less: zeros that a rank leaves out
                raise ValueError(
                    f"{self.plan.layer}: planned for a shared expert of width {width}, {spec.shared.format.value}; "
                    f"found width {shared.width}, {shared.format.value}"
                )
        wanted = (spec.hidden, spec.routed.width // parts, spec.routed.format)
        given = (routed.hidden, routed.width, routed.format)
        if given != wanted:
            told = (f"hidden size {h}, width {w}, {form.value}" for h, w, form in (wanted, given))
            raise ValueError("{}: planned for routed experts of {}; found {}".format(self.plan.layer, *told))

    def _pack(
        self,
        routed: ExpertWeights,
        shared: ExpertWeights | None,
        activation: Activation,
        shared_activation: Activation,
        consume: bool,
    ) -> PackedLayer:
        """Pack for the planned backend, or for the next one where the weights hold what no header tells."""
        while True:
            try:
                return get(self.plan.backend).pack(
                    routed,
                    shared,
                    activation=activation,
                    shared_activation=shared_activation,
                    activations=self.plan.activations,
                    consume=consume,
                )
            except Unsupported as error:
                self.plan = without_backend(self.plan, str(error), routed.device)

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        *,
        shared_weights: Tensor | None = None,
        routed_scale: float = 1.0,
        num_valid_tokens: int | Tensor | None = None,
        shared_rows: tuple[int, int] | Tensor | None = None,
    ) -> Tensor:
        """``y[m] = routed_scale * sum_k w[m,k] E[id[m,k]](x[m]) + s[m] S(x[m])``, rounded once.

        Args:
            x: ``[M, H]`` bf16, fp16 or float32.
            topk_ids: ``[M, K]`` int32 or int64 ids over all ranks' experts; -1 adds nothing, whatever its weight.
            topk_weights: ``[M, K]`` float32, used as given.
            shared_weights: ``[M]`` float32, s; 1 where None.
            routed_scale: for models whose router leaves ``routed_scaling_factor`` out of the weights.
            num_valid_tokens: rows from here on are padding; their output is zero. An int, or an int32 tensor of one
                element (safe in a CUDA graph).
            shared_rows: (start, end) rows that get the shared part; ints or an int32 tensor ``[2]``.

        Returns:
            ``[M, H]`` in x's dtype.

        Raises:
            ValueError: shapes that do not belong together; ids out of range (looked at on the CPU only: on a GPU such
                an id is no route and is counted in :meth:`stats`).
            TypeError: dtypes.
        """
        if torch.compiler.is_compiling():
            # The op takes tensors; from the host's, :meth:`run` makes numbers again.
            rows = torch.tensor(shared_rows, dtype=torch.int32) if isinstance(shared_rows, tuple) else shared_rows
            valid = torch.tensor([num_valid_tokens]) if isinstance(num_valid_tokens, int) else num_valid_tokens
            y: Tensor = op.moe(x, topk_ids, topk_weights, shared_weights, routed_scale, valid, rows, self._handle)
            return y
        return self.run(x, topk_ids, topk_weights, shared_weights, routed_scale, num_valid_tokens, shared_rows)

    @torch.no_grad()
    def run(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        shared_weights: Tensor | None,
        routed_scale: float,
        num_valid_tokens: int | Tensor | None,
        shared_rows: tuple[int, int] | Tensor | None,
    ) -> Tensor:
        """:meth:`forward` with positional arguments, for the torch op."""
        valid, rows = self._bounds(num_valid_tokens, shared_rows)
        self._check_call(x, topk_ids, topk_weights, shared_weights, valid)
        if x.shape[0] == 0:
            return x.new_empty(x.shape)
        weights = topk_weights.to(torch.float32)
        call = Call(
            x.contiguous(),
            topk_ids,
            weights,
            None if shared_weights is None else shared_weights.to(torch.float32).contiguous(),
            float(routed_scale),
            valid,
            rows,
        )
        slot = self.plan.strategy == "slot"
        call = self.packed.rank_routes(call, self.experts, self.plan.spec.routed.count, slot=slot)
        return run_planned(self.packed, self.plan, call, x.shape[0])

    def _bounds(
        self, valid: int | Tensor | None, rows: tuple[int, int] | Tensor | None
    ) -> tuple[int | Tensor | None, tuple[int, int] | Tensor | None]:
        """Row bounds as numbers, or as contiguous tensors where only the device knows them."""
        layer = self.plan.layer
        for name, bound, size in (("num_valid_tokens", valid, 1), ("shared_rows", rows, 2)):
            if isinstance(bound, Tensor) and (bound.is_floating_point() or bound.numel() != size):
                raise ValueError(
                    f"{layer}: {name} must be {size} int32 or int64 number{'s' * (size > 1)}, found "
                    f"{list(bound.shape)} {bound.dtype}"
                )
        if isinstance(valid, Tensor):
            valid = int(valid) if valid.is_cpu else valid.reshape(1)
        if isinstance(rows, Tensor):
            rows = tuple(rows.tolist()) if rows.is_cpu else rows.contiguous()
        if not isinstance(valid, Tensor) and valid is not None and (not isinstance(valid, Integral) or valid < 0):
            raise ValueError(f"{layer}: num_valid_tokens must be 0 or more, found {valid}")
        if not isinstance(rows, Tensor) and rows is not None and not _is_pair(rows):
            raise ValueError(f"{layer}: shared_rows must be (start, end), found {rows}")
        return valid, rows

    def _check_call(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        shared_weights: Tensor | None,
        valid: int | Tensor | None,
    ) -> None:
        name, spec = self.plan.layer, self.plan.spec
        for what, tensor in (
            ("x", x),
            ("topk_ids", ids),
            ("topk_weights", weights),
            ("shared_weights", shared_weights),
        ):
            if tensor is not None and tensor.device != self.device:
                raise ValueError(f"{name}: {what} is on {tensor.device}, the layer on {self.device}")
        if x.dtype not in _DTYPES:
            raise TypeError(f"{name}: x must be bfloat16, float16 or float32, found {x.dtype}")
        if ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: topk_ids must be int32 or int64, found {ids.dtype}")
        if x.dim() != 2 or x.shape[1] != spec.hidden:
            raise ValueError(f"{name}: x must be [M, {spec.hidden}], found {list(x.shape)}")
        if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
            raise ValueError(
                f"{name}: topk_ids and topk_weights must both be [{x.shape[0]}, K], found {list(ids.shape)} and "
                f"{list(weights.shape)}"
            )
        if self.top_k >= 0 and ids.shape[1] != self.top_k:
            raise ValueError(
                f"{name}: the router of this layer chooses {self.top_k} experts, found {ids.shape[1]} ids a token; "
                "the shared expert's slot is added here and never comes from the router"
            )
        if ids.shape[1] > spec.routed.count:
            raise ValueError(f"{name}: {ids.shape[1]} ids a token but only {spec.routed.count} routed experts")
        if shared_weights is not None and shared_weights.shape != x.shape[:1]:
            raise ValueError(f"{name}: shared_weights must be [{x.shape[0]}], found {list(shared_weights.shape)}")
        if not weights.is_floating_point():
            raise TypeError(f"{name}: topk_weights must be float32, found {weights.dtype}")
        if ids.device.type == "cpu" and (used := ids if valid is None else ids[: int(valid)]).numel():
            low, high = (int(v) for v in used.aminmax())
            if low < -1 or high >= spec.routed.count:
                raise ValueError(f"{name}: ids must lie in -1 .. {spec.routed.count - 1}, found {low} .. {high}")

    def stats(self) -> dict[str, Any]:
        """What runs: strategy, backend, the token counts that fold, and the backend's own counters."""
        how = self.plan.strategy if self.plan.folded else self.plan.arm
        facts = {"layer": self.plan.layer, "arm": how, "backend": self.plan.backend, "fold_rows": self.plan.fold_rows}
        return {**facts, **self.packed.stats()}

    def memory(self) -> dict[str, int]:
        """Bytes: packed weights, shared workspace, and what the unfolded layer holds as stored."""
        return {
            "weights": self.packed.nbytes,
            "workspace": self.packed.workspace_nbytes,
            "stored": self.plan.bytes_before,
        }

    def unpack(self) -> tuple[ExpertWeights, ExpertWeights | None]:
        """This rank's routed and shared weights as stored, bit for bit (a requantised shared expert as requantised)."""
        routed, shared = self.packed.unpack()
        if self.plan.strategy != "slot" or self.plan.spec.shared is None:
            return routed, shared
        slot, width = routed[len(self.experts) :], self.plan.spec.shared.width // self.plan.placement.tp_size
        return routed[: len(self.experts)], slot.unpadded(width)

    def checkpoint_tensors(self) -> dict[str, Tensor]:
        """This rank's experts under the checkpoint's own names, bit for bit as the file has them.

        Raises:
            ValueError: for a layer that did not come from a checkpoint, or whose shared expert was requantised.
        """
        if self.stored_as is None:
            raise ValueError(f"{self.plan.layer} was not loaded from a checkpoint; unpack() gives its stored weights")
        if self.plan.requantize:
            raise ValueError(
                f"{self.plan.layer}: the shared expert was requantised to {self.plan.spec.routed.format.value}, "
                "its own tensors are no longer held; read them from the checkpoint"
            )
        return layer_tensors(self.stored_as, *self.unpack(), placement=self.plan.placement)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a layer of its own, for ``torch.compile`` too."""
        super().__setstate__(state)
        self._handle = op.register(self)

    def extra_repr(self) -> str:
        return str(self.plan)


def _is_pair(rows: object) -> bool:
    return isinstance(rows, tuple | list) and len(rows) == 2 and all(isinstance(row, Integral) for row in rows)


def _planned(plan: LayerPlan, *given: Activation | None) -> tuple[Activation, Activation]:
    """The plan's activations, routed and shared; any that are given must be these."""
    planned = plan.spec.activation, plan.spec.shared_activation
    for which, found, wanted in zip(("routed", "shared"), given, planned, strict=True):
        if found not in (None, wanted):
            raise ValueError(f"{plan.layer}: planned for the {which} experts' {wanted}; found {found}")
    return planned


def _spec(
    name: str,
    routed: ExpertWeights,
    shared: ExpertWeights | None,
    activation: Activation,
    shared_activation: Activation,
    placement: Placement,
    top_k: int | None,
    num_experts: int | None,
) -> LayerSpec:
    """The whole layer's facts from one rank's shard of weights."""
    parts = placement.tp_size
    count = num_experts if num_experts is not None else routed.num_experts * placement.ep_size
    whole = replace(ExpertSpec.of(routed), count=count, width=routed.width * parts)
    whole_shared = replace(ExpertSpec.of(shared), width=shared.width * parts) if shared else None
    quantized = all(experts.down.scales is not None for experts in (routed, shared) if experts is not None)
    return LayerSpec(
        name,
        routed.hidden,
        -1 if top_k is None else top_k,
        whole,
        whole_shared,
        activation,
        shared_activation,
        activations="fp8" if quantized else "bf16",
    )
