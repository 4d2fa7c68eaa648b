"""What an accuracy run found, item by item, and its file.

The file holds every item's scores, so that two runs can be paired later and nothing has to be believed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from foldmoe import result_file
from foldmoe.evaluate.request import Request  # noqa: TC001  a file's fields are checked against it at run time

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

KIND = "eval"
"""The ``kind`` of the file."""

Finish = Literal["stop", "length", "unknown"]


@dataclass(frozen=True)
class Sample:
    """One item as one arm answered it.

    Args:
        id: the item's number in its task; items are paired by it.
        prompt_hash: of the prompt; paired items must have been asked the same.
        scores: by metric (``strict-match``, ``flexible-extract``, ...), 0 to 1.
        text: the answer; empty for tasks that compare likelihoods.
        finish: ``stop`` ended by itself, ``length`` was cut at the token limit, ``unknown`` was not said.
        tokens: new tokens; None where nobody counted.
        past_end: text follows the final answer that the strict filter took.
        group: a part of the task that is worth a row of its own, such as one length and depth.
    """

    id: int
    prompt_hash: str
    scores: dict[str, float]
    text: str = ""
    finish: Finish = "unknown"
    tokens: int | None = None
    past_end: bool = False
    group: str = ""


@dataclass(frozen=True)
class TaskResult:
    """One task in one arm.

    Args:
        samples: in the order of their ids.
        version: of the task.
        token_limit: new tokens at most; None for tasks that compare likelihoods.
        shots: examples before the question.
        generation: sampling and stop settings as the model was given them.
        seconds: spent on the task; None where tasks ran together.
    """

    samples: tuple[Sample, ...]
    version: str = ""
    token_limit: int | None = None
    shots: int = 0
    generation: dict[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the scores, in the task's order."""
        return tuple(self.samples[0].scores) if self.samples else ()

    @property
    def generates(self) -> bool:
        """The model writes answers; False where likelihoods are compared."""
        return self.token_limit is not None

    def scores(self, metric: str) -> list[float]:
        return [sample.scores[metric] for sample in self.samples]

    def score(self, metric: str, *, ended: bool = False) -> float | None:
        """Mean of ``metric``; of the answers that were not cut by length if ``ended``. None where there are none."""
        scores = [s.scores[metric] for s in self.samples if not (ended and s.finish == "length")]
        return sum(scores) / len(scores) if scores else None

    @property
    def cut(self) -> float:
        """Share of answers cut by the token limit."""
        return self._share(lambda sample: sample.finish == "length")

    @property
    def empty(self) -> float:
        """Share of answers without text."""
        return self._share(lambda sample: not sample.text.strip())

    @property
    def past_end(self) -> float:
        """Share of answers that go on after their final answer."""
        return self._share(lambda sample: sample.past_end)

    @property
    def finish_known(self) -> bool:
        """False where some answer did not say why it ended: then ``cut`` is a lower bound."""
        return all(sample.finish != "unknown" for sample in self.samples)

    def _share(self, holds: Callable[[Sample], bool]) -> float:
        return sum(map(holds, self.samples)) / len(self.samples) if self.samples else 0.0


@dataclass(frozen=True)
class LayerError:
    """One layer of one arm on random input, as a relative error.

    Args:
        how: strategy and backend.
        reference: against the float64 reference on what the arm holds.
        stored: against the unfolded layer as stored; what lowering precision costs shows here.
        allowed: what ``reference`` may be.
    """

    layer: str
    how: str
    reference: float
    stored: float | None
    allowed: float
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArmResult:
    """One arm.

    Args:
        arm: what was asked for.
        resolved: what ran, read from the model or the server itself; empty where it does not say.
        tasks: by name.
        layers: empty where the arm's layers are not ours, or the checkpoint is not at hand. Of a served arm they were
            computed beside the server, from the same checkpoint.
        server: what a served arm says about itself (URL, model, version).
    """

    arm: str
    resolved: str
    tasks: dict[str, TaskResult]
    layers: tuple[LayerError, ...] = ()
    server: dict[str, str] = field(default_factory=dict)

    @property
    def worst_layer(self) -> LayerError | None:
        return max(self.layers, key=lambda layer: max(layer.reference, layer.stored or 0.0), default=None)


@dataclass(frozen=True)
class EvalResult:
    """All arms of one run.

    Args:
        source: name of the checkpoint or of the served model.
        request: what was asked for; ``request.command`` repeats the run.
        baseline: the arm that the others are compared with.
        arms: in the order of the request.
        harness: what asked the questions, with its version.
        versions: of packages and devices.
        notes: what the reader must know, such as metrics that could not be paired.
    """

    source: str
    request: Request
    baseline: str
    arms: tuple[ArmResult, ...]
    harness: str
    versions: dict[str, str]
    notes: tuple[str, ...] = ()

    def arm(self, name: str) -> ArmResult:
        """The arm of this name.

        Raises:
            ValueError: there is none.
        """
        found = next((arm for arm in self.arms if arm.arm == name), None)
        if found is None:
            raise ValueError(f"no arm {name!r}; there are: {', '.join(arm.arm for arm in self.arms)}")
        return found

    def save(self, path: str | Path) -> None:
        """Write the result as JSON."""
        result_file.save(path, KIND, self)


def load(path: str | Path) -> EvalResult:
    """Read what :meth:`EvalResult.save` wrote.

    Raises:
        ValueError: another kind of file, or one that does not fit.
    """
    return result_file.load(path, KIND, EvalResult)
