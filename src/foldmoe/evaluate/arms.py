"""The arms of an accuracy A/B in process: the same stored file, read and run in different ways."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from foldmoe.evaluate.result import LayerError
from foldmoe.planner import FusionPolicy
from foldmoe.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from foldmoe.layer import FoldedMoE


@dataclass(frozen=True)
class Arm:
    """One way to run a checkpoint.

    Args:
        build: (folder, device) to a Transformers model in eval mode.
        policy: of our layers; None where they are not ours.
    """

    build: Callable[[Path, torch.device], Any]
    policy: FusionPolicy | None = None


def _transformers(path: Path, device: torch.device) -> Any:
    """Transformers' own loader and blocks, experts dequantised."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()


def _ours(policy: FusionPolicy) -> Arm:
    def build(path: Path, device: torch.device) -> Any:
        from foldmoe.integrations.transformers import load

        return load(path, policy, device=device, quiet=True)

    return Arm(build, policy)


def _zeroed(part: str) -> Arm:
    """A control: without one kind of expert the scores must fall, or they say nothing about it."""

    def build(path: Path, device: torch.device) -> Any:
        from foldmoe.integrations.transformers import load
        from foldmoe.integrations.transformers.blocks import moe_blocks

        model = load(path, FusionPolicy("stock"), device=device, quiet=True)
        for block in moe_blocks(model):
            target = block.shared.get_submodule("down_proj").weight if part == "shared" else block.experts.down_proj
            with torch.no_grad():
                target.zero_()  # type: ignore[operator]
        return model

    return Arm(build)


ARMS: dict[str, Arm] = {
    "transformers": Arm(_transformers),
    "serial": _ours(FusionPolicy("off")),
    "native": _ours(FusionPolicy("native")),
    "slot": _ours(FusionPolicy("slot")),
    "slot-requantized": _ours(FusionPolicy("slot", allow_requantize=True)),
    "shared-zeroed": _zeroed("shared"),
    "routed-zeroed": _zeroed("routed"),
}
"""By name. ``serial`` is what the others are compared with."""


SERVED: dict[str, FusionPolicy] = {
    **{name: arm.policy for name, arm in ARMS.items() if arm.policy},
    "auto": FusionPolicy(),
    "dual": FusionPolicy("dual"),
    "off": FusionPolicy("off"),
    "folded": FusionPolicy("native"),
    "dual-stream": FusionPolicy("dual"),
}
"""What the name of a served arm stands for: arms in process, values of ``FOLDMOE_FOLD``, arms of ``bench serve``."""


def resolved(model: Any) -> str:
    """What a model's layers really run, read from the layers: "native on torch 5/5", or that they are not ours."""
    from foldmoe.integrations.transformers import FoldedBlock

    layers: list[FoldedMoE] = [block.moe for block in model.modules() if isinstance(block, FoldedBlock)]
    if not layers:
        return "Transformers' own layers"
    kinds = Counter(
        f"{plan.strategy if plan.folded else plan.arm} on {plan.backend}{', requantised' if plan.requantize else ''}"
        for plan in (moe.plan for moe in layers)
    )
    return "; ".join(f"{kind} {count}/{len(layers)}" for kind, count in kinds.items())


def layer_errors(path: str | Path, policy: FusionPolicy, device: torch.device) -> tuple[LayerError, ...]:
    """Every layer of a checkpoint on random bf16 input, run as the policy says.

    Raises:
        CheckpointError: a checkpoint that cannot be read.
    """
    return tuple(
        LayerError(check.layer, check.how, check.folded, check.agreement, check.tolerance, check.problems)
        for check in verify(path, policy=policy, device=device, dtype=torch.bfloat16)
        if not check.skipped
    )
