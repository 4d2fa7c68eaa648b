"""Fold and unfold the MoE blocks of a model that is already in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from foldmoe.integrations.transformers.blocks import FoldedBlock, MoEBlock, moe_blocks
from foldmoe.integrations.transformers.twin import Twins
from foldmoe.layer import FoldedMoE
from foldmoe.moe import ExpertSpec, LayerSpec
from foldmoe.planner import FusionPolicy, LayerPlan, plan_layer

if TYPE_CHECKING:
    from torch import nn


@dataclass
class FoldReport:
    """What became of every MoE block.

    Args:
        plans: decisions of the layers that were swapped.
        refused: reasons of the layers that stay stock, by name.
    """

    plans: list[LayerPlan] = field(default_factory=list)
    refused: dict[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return len(self.plans) + len(self.refused)

    def count(self, strategy: str) -> int:
        """Folded layers of one strategy."""
        return sum(plan.folded and plan.strategy == strategy for plan in self.plans)

    @property
    def extra_bytes(self) -> int:
        return sum(plan.extra_bytes for plan in self.plans)

    def lines(self) -> list[str]:
        """One line of summary, then one per layer that did not fold."""
        native, slot = self.count("native"), self.count("slot")
        summary = f"folded {native + slot}/{self.total} layers (native {native}, slot {slot}), {self.extra_bytes:+,} B"
        unfolded = [f"{plan.layer}: {plan.arm}: {'; '.join(plan.reasons)}" for plan in self.plans if not plan.folded]
        stock = [f"{name}: stock: {'; '.join(reasons)}" for name, reasons in self.refused.items()]
        return [f"foldmoe: {line}" for line in (summary, *unfolded, *stock)]

    def print(self) -> None:
        print("\n".join(self.lines()), flush=True)


@torch.inference_mode(False)  # weights that are made here must be able to ask for gradients when they come back
def fold(model: nn.Module, policy: FusionPolicy | None = None, *, quiet: bool = False) -> FoldReport:
    """Swap every MoE block of ``model``, in place, so that routed and shared experts run in one call.

    All blocks are decided before the first is swapped. A block is swapped only if, on a narrow copy with random
    weights, its own class computes what the folded one computes (:mod:`foldmoe.integrations.transformers.twin`).

    Args:
        model: any Transformers model; blocks that cannot be swapped stay, with the reason.
        policy: see :class:`foldmoe.FusionPolicy`.
        quiet: do not print the summary.

    Returns:
        What became of each block.

    Raises:
        ValueError: ``model`` is itself a MoE block, which has no place to be swapped in; or a backend of that name is
            not there. Nothing was touched.
        TypeError: ``policy`` is no policy.
    """
    check_policy(policy)
    _check_root(model, [block.name for block in moe_blocks(model)])
    twins, report = Twins(), FoldReport()
    decided = [(block, _decide(block, policy, twins)) for block in moe_blocks(model)]
    for block, decision in decided:
        outcome = _swap(model, block, decision) if isinstance(decision, _Decision) else decision
        if isinstance(outcome, LayerPlan):
            report.plans.append(outcome)
        else:
            report.refused[block.name] = outcome
    if not quiet:
        report.print()
    return report


def check_policy(policy: FusionPolicy | None) -> None:
    """Catch a strategy's name in the policy's place.

    Raises:
        TypeError: neither a policy nor None.
    """
    if policy is not None and not isinstance(policy, FusionPolicy):
        raise TypeError(f"policy must be a FusionPolicy, found {policy!r}; FusionPolicy('native'), say")


def _check_root(model: nn.Module, names: list[str]) -> None:
    if "" in names:
        raise ValueError(
            f"found one MoE block ({type(model).__name__}) in place of a model: blocks are swapped in the module that "
            "holds them, so give that module"
        )


class _Decision(NamedTuple):
    """How a block runs; ``routed_scale`` as in :class:`FoldedBlock`."""

    plan: LayerPlan
    routed_scale: float


def _decide(block: MoEBlock, policy: FusionPolicy | None, twins: Twins) -> _Decision | tuple[str, ...]:
    """How the block will run, or why it stays."""
    obstacles = block.obstacles()
    if obstacles:
        return obstacles
    device = block.parameters()[0].device
    if device.type == "meta":
        return ("weights are on the meta device: offloaded, or never loaded",)
    routed, shared = block.weights()
    spec = LayerSpec(
        block.name,
        routed.hidden,
        block.top_k,
        ExpertSpec.of(routed),
        ExpertSpec.of(shared),
        block.activation(),
        block.activation(),
        shared_gate=block.shared_gate is not None,
    )
    plan = plan_layer(spec, policy, device)
    if plan.arm == "stock":
        return plan.reasons
    scale = twins.routed_scale(block, spec)
    return (scale,) if isinstance(scale, str) else _Decision(plan, scale)


def _swap(model: nn.Module, block: MoEBlock, decision: _Decision) -> LayerPlan | tuple[str, ...]:
    """What runs in the block's place, or why nothing of ours does; the block then still has its weights."""
    routed, shared = block.weights()
    try:
        moe = FoldedMoE(routed, shared, plan=decision.plan, consume=True)
    except ValueError as error:
        return (str(error),)
    model.set_submodule(block.name, FoldedBlock(block, moe, decision.routed_scale))
    block.release()
    return moe.plan


@torch.inference_mode(False)
def unfold(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Put the stock blocks back, with the stored weights as numbers of ``dtype``.

    Experts that were stored in 4 or 8 bits come back dequantised, since the stock blocks hold plain numbers.

    Args:
        model: one that :func:`fold` or :func:`foldmoe.integrations.transformers.load` made.
        dtype: of the experts; what it was when the model was folded or loaded, by default. Give it if the rest of the
            model was cast since.

    Returns:
        How many blocks were put back.

    Raises:
        ValueError: ``model`` is itself a folded block, which has no place to be swapped in. Nothing was touched.
    """
    folded = [(name, module) for name, module in model.named_modules() if isinstance(module, FoldedBlock)]
    _check_root(model, [name for name, _ in folded])
    for name, module in folded:
        routed, shared = module.moe.unpack()
        assert shared is not None
        stock = cast("MoEBlock", module.stock)
        stock.restore(routed, shared, dtype)
        model.set_submodule(name, stock.module)
    return len(folded)
