"""Fold and unfold the MoE blocks of a model that is already in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from foldmoe.integrations.transformers.blocks import FoldedBlock, MoEBlock, moe_blocks
from foldmoe.layer import FoldedMoE
from foldmoe.moe import ExpertSpec, LayerSpec
from foldmoe.planner import FusionPolicy, LayerPlan, plan_layer

if TYPE_CHECKING:
    import torch
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


def fold(model: nn.Module, policy: FusionPolicy | None = None, *, quiet: bool = False) -> FoldReport:
    """Swap every MoE block of ``model``, in place, so that routed and shared experts run in one call.

    Args:
        model: any Transformers model; blocks that cannot be swapped stay, with the reason.
        policy: see :class:`foldmoe.FusionPolicy`.
        quiet: do not print the summary.

    Returns:
        What became of each block.
    """
    report = FoldReport()
    for block in list(moe_blocks(model)):
        reasons = block.obstacles()
        plan = None if reasons else _plan(block, policy)
        if plan is None or plan.arm == "stock":
            report.refused[block.name] = reasons or (plan.reasons if plan else ())
            continue
        routed, shared = block.weights()
        moe = FoldedMoE(routed, shared, activation=block.activation(), plan=plan, consume=True)
        block.release()
        model.set_submodule(block.name, FoldedBlock(block, moe))
        report.plans.append(plan)
    if not quiet:
        report.print()
    return report


def _plan(block: MoEBlock, policy: FusionPolicy | None) -> LayerPlan:
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
    return plan_layer(spec, policy, routed.device)


def unfold(model: nn.Module, dtype: torch.dtype | None = None) -> int:
    """Put the stock blocks back, with the stored weights as numbers of ``dtype`` (the router's by default).

    Experts that were stored in 4 or 8 bits come back dequantised, since the stock blocks hold plain numbers.

    Returns:
        How many blocks were put back.
    """
    folded = [(name, module) for name, module in model.named_modules() if isinstance(module, FoldedBlock)]
    for name, module in folded:
        routed, shared = module.moe.unpack()
        assert shared is not None
        stock = cast("MoEBlock", module.stock)
        stock.restore(routed, shared, dtype or next(module.gate.parameters()).dtype)
        model.set_submodule(name, stock.module)
    return len(folded)
