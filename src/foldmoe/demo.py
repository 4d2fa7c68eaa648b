"""The main job in three minutes: plan a DeepSeek-V4 checkpoint, fold it three ways, show that the answers agree."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Protocol

from foldmoe.evaluate.skills import LONGEST_ANSWER, TINY_V4, TaskAnswers, answer, evaluation_items
from foldmoe.options import in_range
from foldmoe.planner import CheckpointPlan, FusionPolicy, plan_checkpoint
from foldmoe.planner.devices import torch_device
from foldmoe.verify import verify

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

ARMS = {
    "serial": FusionPolicy("off"),
    "native": FusionPolicy("native"),
    "slot, requantised": FusionPolicy("slot", allow_requantize=True),
}
"""The three ways, the unfolded one first: the others are compared with it."""


class Steps(Protocol):
    """Where the demo reports: a progress bar a step."""

    def step(self, label: str, total: int) -> Callable[[int], None]:
        """Begin a step of ``total`` units; call the result with the units done."""
        ...


@dataclass(frozen=True)
class ArmResult:
    """One way of running the model.

    Args:
        worst_error: the largest relative error of a layer: against the float64 reference, and against the unfolded
            run of the stored weights (so that requantising shows).
        resident: bytes of packed experts held.
        answers: by task.
        same: tokens that equal the unfolded run's, and how many it said.
    """

    arm: str
    folded: str
    worst_error: float
    resident: int
    answers: dict[str, TaskAnswers]
    same: tuple[int, int]


@dataclass(frozen=True)
class DemoResult:
    """All that the demo found."""

    trained: bool
    plan: CheckpointPlan
    arms: list[ArmResult]


@contextmanager
def checkpoint() -> Iterator[tuple[Path, bool]]:
    """The trained checkpoint of the package, or a generated one (random weights) where it was left out."""
    if (TINY_V4 / "config.json").exists():
        yield TINY_V4, True
        return
    from foldmoe.checkpoint.generate import generate

    with TemporaryDirectory() as folder:
        yield generate("v4", Path(folder) / "v4"), False


def run(steps: Steps, *, items: int = 50, device: torch.device | str | None = None) -> DemoResult:
    """Plan, load and ask, arm by arm.

    Args:
        steps: where progress goes.
        items: items a task; 0 asks none.
        device: the GPU if there is one.

    Raises:
        ValueError: fewer items than none, or a device that is not here.
    """
    in_range(0, items=items)
    target = torch_device(device)
    with checkpoint() as (path, trained):
        plan = plan_checkpoint(path, device=target)
        arms: list[ArmResult] = []
        for name, policy in ARMS.items():
            first = arms[0].answers if arms else None
            arms.append(_arm(name, policy, path, steps, items if trained else 0, target, first))
        return DemoResult(trained, plan, arms)


def _arm(
    name: str,
    policy: FusionPolicy,
    path: Path,
    steps: Steps,
    items: int,
    device: torch.device,
    first: dict[str, TaskAnswers] | None,
) -> ArmResult:
    from foldmoe.integrations.transformers import FoldedBlock, load

    advance = steps.step(f"{name}: load", len(plan_checkpoint(path).rows))
    model = load(path, policy, device=device, quiet=True, progress=lambda *_: advance(1))
    blocks = [module for module in model.modules() if isinstance(module, FoldedBlock)]
    answers = {task: _ask(model, path, task, asked, steps, name) for task, asked in _asked(items).items()}
    checks = list(verify(path, policy=policy, device=model.device))
    return ArmResult(
        name,
        f"{sum(plan.folded for plan in model.fold_report.plans)}/{model.fold_report.total}",
        max(max(check.folded, check.agreement or 0.0) for check in checks),
        sum(block.moe.memory()["weights"] for block in blocks),
        answers,
        _same(answers, first or answers),
    )


def _asked(items: int) -> dict[str, Any]:
    return evaluation_items(items) if items else {}


def _ask(model: Any, path: Path, task: str, asked: Any, steps: Steps, name: str) -> TaskAnswers:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    advance = steps.step(f"{name}: {task}", len(asked))
    return answer(model, tokenizer, asked, LONGEST_ANSWER[task], progress=advance)


def _same(answers: dict[str, TaskAnswers], first: dict[str, TaskAnswers]) -> tuple[int, int]:
    """Tokens alike at the same place of the same answer, and tokens of the first run."""
    same = total = 0
    for task, said in first.items():
        for mine, theirs in zip(answers[task].tokens, said.tokens, strict=True):
            same += sum(a == b for a, b in zip(mine, theirs, strict=False))
            total += len(theirs)
    return same, total
