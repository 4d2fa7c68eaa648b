"""One accuracy run: every arm is asked the same questions, in process or served, and its layers are checked first."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from foldmoe.checkpoint import CheckpointError
from foldmoe.evaluate import harness as lm_eval_harness
from foldmoe.evaluate import server, skills
from foldmoe.evaluate.arms import ARMS, SERVED, layer_errors, resolved
from foldmoe.evaluate.result import ArmResult, EvalResult, LayerError, TaskResult
from foldmoe.planner.devices import torch_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from foldmoe.evaluate.request import Request
    from foldmoe.planner import FusionPolicy

_OWN_ITEMS = 200


class Steps(Protocol):
    """Where a run reports."""

    def step(self, label: str, total: int | None) -> Callable[[int], None]:
        """Begin a step of ``total`` units (None: unknown); call the result with the units done since the last call."""
        ...


def run(
    request: Request,
    steps: Steps,
    *,
    versions: Mapping[str, str] | None = None,
    states: Mapping[str, str] | None = None,
    finished: Callable[[EvalResult], None] | None = None,
) -> EvalResult:
    """Ask every arm.

    Args:
        request: what is asked; its baseline is the arm "serial", else "stock", else the first.
        steps: where progress goes.
        versions: of packages and devices, for the record.
        states: what served arms are known to run, by name.
        finished: called after every arm with the result so far, so that a later arm that fails loses nothing.

    Raises:
        ValueError: an unknown arm or task, a server that does not answer, or lm-eval missing where it is needed.
        CheckpointError: a checkpoint that cannot be read.
    """
    if unknown := [arm for arm in request.arms if arm not in ARMS]:
        raise ValueError(f"no arm {', '.join(unknown)}; there are: {', '.join(ARMS)}")
    servers = {arm: server.describe(arm, url) for arm, url in request.server.items()}
    harness = None
    asked_by = "foldmoe's own scoring"
    if not request.uses_own_tasks:
        asked_by = lm_eval_harness.require()
        done = steps.step("loading tasks", 1)
        harness = lm_eval_harness.Harness(request)
        done(1)
    source = Path(request.checkpoint or skills.TINY_V4).name
    if not request.checkpoint and servers:
        source = next(iter(servers.values()))["model"]
    layers = _ServedLayers(request, steps)
    asked = (*request.arms, *servers)
    arms: tuple[ArmResult, ...] = ()
    for arm in asked:
        if arm in servers:
            arms += (_served(request, arm, servers[arm], harness, steps, states or {}, layers),)
        else:
            arms += (_in_process(request, arm, harness, steps),)
        names = asked[: len(arms)]
        baseline = next((name for name in ("serial", "stock") if name in names), names[0])
        left = asked[len(arms) :]
        notes = (
            *([f"arms that did not finish, and are left out: {', '.join(left)}"] if left else []),
            *layers.notes,
            *(dict.fromkeys(harness.notes) if harness else ()),
        )
        result = EvalResult(source, request, baseline, arms, asked_by, dict(versions or {}), notes)
        if finished is not None:
            finished(result)
    return result


def _in_process(request: Request, arm: str, harness: lm_eval_harness.Harness | None, steps: Steps) -> ArmResult:
    from transformers import AutoTokenizer

    path = Path(request.checkpoint or skills.TINY_V4)
    device, policy = torch_device(request.device), ARMS[arm].policy
    layers = _layers(path, arm, policy, device, steps) if policy else ()
    torch.manual_seed(request.seed)
    model = ARMS[arm].build(path, device)
    tokenizer = AutoTokenizer.from_pretrained(path)
    if harness is not None:
        done = steps.step(f"{arm}: {', '.join(request.tasks)}", harness.answers)
        tasks = harness.ask(lm_eval_harness.in_process(model, tokenizer, request, done))
    else:
        tasks = {task: _ask(request, arm, task, model, tokenizer, steps) for task in request.tasks}
    result = ArmResult(arm, resolved(model), tasks, layers)
    del model
    gc.collect()  # the next arm's weights must find room
    return result


def _ask(request: Request, arm: str, task: str, model: Any, tokenizer: Any, steps: Steps) -> TaskResult:
    count = _OWN_ITEMS if request.items is None else request.items
    done = steps.step(f"{arm}: {task}", count)
    return skills.ask(
        model,
        tokenizer,
        task,
        count,
        seed=request.seed,
        token_limit=request.max_tokens,
        batch=request.batch,
        progress=done,
    )


def _layers(path: Path, arm: str, policy: FusionPolicy, device: torch.device, steps: Steps) -> tuple[LayerError, ...]:
    done = steps.step(f"{arm}: layers", 1)
    errors = layer_errors(path, policy, device)
    done(1)
    return errors


@dataclass
class _ServedLayers:
    """The layers of served arms, computed here from the checkpoint: a server shows its answers, not its layers."""

    request: Request
    steps: Steps
    computed: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)

    def of(self, arm: str) -> tuple[LayerError, ...]:
        """Empty with a reason among the notes where they cannot be had."""
        errors, reason = self._compute(arm)
        if reason:
            self.refused.setdefault(reason, []).append(arm)
        else:
            self.computed.append(arm)
        return errors

    def _compute(self, arm: str) -> tuple[tuple[LayerError, ...], str]:
        named, policy, device = self.request.checkpoint, SERVED.get(arm), torch_device(self.request.device)
        if policy is None:
            return (), f"this name stands for no policy of ours; names that do are {', '.join(SERVED)}"
        if named is None or not Path(named).is_dir():
            found = f"{named} is no folder here" if named else "no checkpoint was named"
            return (), f"{found}; expected the folder that is served, as in foldmoe eval FOLDER --server ARM=URL"
        try:
            errors = _layers(Path(named), arm, policy, device, self.steps)
        except CheckpointError as error:  # a tokenizer's folder is enough to ask a server
            return (), str(error)
        except torch.cuda.OutOfMemoryError:
            return (), f"{device} has no room for them beside what runs there; --device cpu computes them on the CPU"
        return errors, "" if errors else f"{named} has no MoE layer in a format that is read here"

    @property
    def notes(self) -> list[str]:
        lines = [f"no layer errors of {', '.join(arms)}: {reason}" for reason, arms in self.refused.items()]
        if self.computed:
            arms, device = ", ".join(self.computed), torch_device(self.request.device)
            lines.append(
                f"layer errors of {arms} were computed here, on {device}, from the checkpoint with the policy that the "
                "name stands for; not by the server"
            )
        return lines


def _served(
    request: Request,
    arm: str,
    facts: dict[str, str],
    harness: lm_eval_harness.Harness | None,
    steps: Steps,
    states: Mapping[str, str],
    layers: _ServedLayers,
) -> ArmResult:
    assert harness is not None  # a request with servers has tasks of lm-eval
    errors = layers.of(arm)
    done = steps.step(f"{arm}: {', '.join(request.tasks)}", harness.answers)
    tasks = harness.ask_server(arm, facts, done)
    return ArmResult(arm, states.get(arm, ""), tasks, errors, facts)
