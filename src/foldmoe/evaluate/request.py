"""What an accuracy run is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foldmoe import result_file
from foldmoe.evaluate.presets import PRESETS
from foldmoe.options import distinct, in_range

MARGIN = 0.03
"""A difference within this share of the items counts as equal, unless another is asked for."""

SEED = 2026
"""Of what is asked, unless another is asked for."""

OWN_TASKS = ("needle", "arithmetic")
"""Asked in process without lm-eval; all other names are lm-eval's."""


@dataclass(frozen=True)
class Request:
    """What to ask whom. Each field is an option of the command, under the same name.

    Args:
        checkpoint: folder of a local checkpoint; None: tiny-v4 for arms in process. For served arms the tokenizer's
            folder or name, which tasks that compare likelihoods and RULER's need.
        arms: of :data:`foldmoe.evaluate.arms.ARMS`, in process. Served arms add to them.
        server: arm name to the base URL of an OpenAI-compatible server, such as ``http://localhost:8000/v1``.
        state_dir: arm name to the ``FOLDMOE_STATE_DIR`` of its server, to read what it runs.
        tasks: :data:`OWN_TASKS`, or names of lm-eval and files of its format.
        preset: of :data:`foldmoe.evaluate.presets.PRESETS`; sets tasks and protocol.
        items: of each task, and of each length of RULER's tasks, at most; None: all, 200 of our own.
        seed: of the items of :data:`OWN_TASKS` and their ``foldmoe_`` namesakes; for lm-eval of sampling, shuffles and
            few-shot examples too. The choices of our multiple-choice tasks have an order of their own.
        max_tokens: new tokens an answer; None: the task's own limit.
        shots: examples before the question; None: the task's own number.
        chat: ask through the chat template, few-shot examples as turns.
        concurrency: requests in flight to a server.
        batch: prompts at a time in process.
        lengths: of the needle-in-a-haystack texts of lm-eval's RULER tasks, in tokens.
        think_end: text that ends thinking, for servers that do not take the thinking out themselves.
        generation: what the preset asks of sampling and chat template.
        margin: a difference within this share counts as equal.
        device: a torch device; None: the GPU if there is one.
    """

    checkpoint: str | None = None
    arms: tuple[str, ...] = ()
    server: dict[str, str] = field(default_factory=dict)
    state_dir: dict[str, str] = field(default_factory=dict)
    tasks: tuple[str, ...] = OWN_TASKS
    preset: str | None = None
    items: int | None = None
    seed: int = SEED
    max_tokens: int | None = None
    shots: int | None = None
    chat: bool = False
    concurrency: int = 8
    batch: int = 50
    lengths: tuple[int, ...] = ()
    think_end: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    margin: float = MARGIN
    device: str | None = None

    def __post_init__(self) -> None:
        in_range(1, items=self.items, max_tokens=self.max_tokens, concurrency=self.concurrency, batch=self.batch)
        in_range(0, shots=self.shots)
        in_range(1, lengths=self.lengths or None)
        in_range(0, 1, margin=self.margin)
        distinct("arms", self.arms)
        distinct("tasks", self.tasks)
        if not self.arms and not self.server:
            raise ValueError("nobody to ask: name arms (--arms serial,native) or servers (--server native=URL)")
        if twice := sorted(set(self.arms) & set(self.server)):
            raise ValueError(f"{', '.join(twice)}: both in process and served; give the served arm another name")
        if self.chat and self.arms and self.server:
            raise ValueError(
                f"in process ({', '.join(self.arms)}) and served ({', '.join(self.server)}) arms with --chat, which "
                "a preset may ask for: servers apply the chat template themselves, so that prompts cannot be paired; "
                "serve all arms, or add --no-chat"
            )
        if self.server and self.uses_own_tasks:
            raise ValueError(
                f"a server is asked through lm-eval: its tasks are {', '.join(f'foldmoe_{t}' for t in OWN_TASKS)}, "
                "gsm8k and whatever else lm-eval knows"
            )
        if stray := sorted(set(self.state_dir) - set(self.server)):
            raise ValueError(f"--state-dir of {', '.join(stray)}, which no --server names: add --server {stray[0]}=URL")
        if (mixed := set(self.tasks) & set(OWN_TASKS)) and len(mixed) < len(set(self.tasks)):
            raise ValueError(
                f"{', '.join(sorted(mixed))} run without lm-eval, the other tasks with it; "
                f"beside those write {', '.join(f'foldmoe_{task}' for task in sorted(mixed))}"
            )

    @property
    def uses_own_tasks(self) -> bool:
        """No lm-eval is needed."""
        return set(self.tasks) <= set(OWN_TASKS)

    @property
    def command(self) -> str:
        """The command line that asks for the same; options at their default, or the preset's, are left out."""
        words = ["foldmoe", "eval"] + ([self.checkpoint] if self.checkpoint else [])
        # The checkpoint is an argument, generation the preset's alone.
        usual = {"checkpoint": self.checkpoint, "generation": self.generation, "server": {}, "state_dir": {}}
        return result_file.command(words, self, PRESETS.get(self.preset or "", {}) | usual)


def from_options(**options: Any) -> Request:
    """A request from what the command line gave; None leaves what the preset or the default says.

    Raises:
        ValueError: an unknown preset, or options that do not go together.
    """
    given = {name: value for name, value in options.items() if value is not None}
    preset = given.get("preset")
    if preset is not None and preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}; there are: {', '.join(PRESETS)}")
    return Request(**{**PRESETS.get(preset or "", {}), **given})
