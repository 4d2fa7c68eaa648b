"""tiny-v4's skills in several arms: the same questions, the stored file read in different ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from foldmoe.evaluate.skills import LONGEST_ANSWER, TaskAnswers, answer, evaluation_items
from foldmoe.planner import FusionPolicy

if TYPE_CHECKING:
    from foldmoe.evaluate.items import Item

Progress = Callable[[str, str, int], Callable[[int], None]]
"""(arm, task, items) to a function that is called with the items done."""


def _transformers(path: Path, device: torch.device) -> Any:
    """Transformers' own loader and blocks, experts dequantised."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(device).eval()


def _folded(policy: FusionPolicy) -> Callable[[Path, torch.device], Any]:
    def build(path: Path, device: torch.device) -> Any:
        from foldmoe.integrations.transformers import load

        return load(path, policy, device=device, quiet=True)

    return build


def _zeroed(part: str) -> Callable[[Path, torch.device], Any]:
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

    return build


ARMS: dict[str, Callable[[Path, torch.device], Any]] = {
    "transformers": _transformers,
    "serial": _folded(FusionPolicy("off")),
    "native": _folded(FusionPolicy("native")),
    "slot-requantized": _folded(FusionPolicy("slot", allow_requantize=True)),
    "shared-zeroed": _zeroed("shared"),
    "routed-zeroed": _zeroed("routed"),
}


@dataclass(frozen=True)
class ArmScore:
    """What one arm answered.

    Args:
        same: by task, items whose answers are the first of our arms' to the token.
        flips: by task, (right before and wrong now, wrong before and right now), against the same arm.
    """

    arm: str
    answers: dict[str, TaskAnswers]
    same: dict[str, int]
    flips: dict[str, tuple[int, int]]


def compare(
    path: str | Path,
    arms: Sequence[str],
    *,
    items: int = 200,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> list[ArmScore]:
    """Ask every arm the same items.

    Args:
        path: a checkpoint of tiny-v4's family, with its tokenizer.
        arms: of :data:`ARMS`; answers are compared with those of "serial" where it is among them, else of the first.
        items: items a task.
        device: the GPU if there is one.
        progress: see :data:`Progress`.

    Raises:
        ValueError: an unknown arm.
    """
    if unknown := [arm for arm in arms if arm not in ARMS]:
        raise ValueError(f"no arm {', '.join(unknown)}; there are: {', '.join(ARMS)}")
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    asked = evaluation_items(items)
    said = {arm: _ask(Path(path), arm, asked, target, progress) for arm in arms}
    baseline = said["serial" if "serial" in said else arms[0]]
    return [
        ArmScore(
            arm,
            answers,
            {task: _same(mine, baseline[task]) for task, mine in answers.items()},
            {task: _flips(mine, baseline[task]) for task, mine in answers.items()},
        )
        for arm, answers in said.items()
    ]


def _ask(
    path: Path, arm: str, asked: dict[str, list[Item]], device: torch.device, progress: Progress | None
) -> dict[str, TaskAnswers]:
    from transformers import AutoTokenizer

    model, tokenizer = ARMS[arm](path, device), AutoTokenizer.from_pretrained(path)
    return {
        task: answer(
            model,
            tokenizer,
            questions,
            LONGEST_ANSWER[task],
            progress=progress(arm, task, len(questions)) if progress else None,
        )
        for task, questions in asked.items()
    }


def _same(mine: TaskAnswers, baseline: TaskAnswers) -> int:
    return sum(a == b for a, b in zip(mine.tokens, baseline.tokens, strict=True))


def _flips(mine: TaskAnswers, baseline: TaskAnswers) -> tuple[int, int]:
    pairs = list(zip(baseline.solved, mine.solved, strict=True))
    return sum(before and not now for before, now in pairs), sum(now and not before for before, now in pairs)
