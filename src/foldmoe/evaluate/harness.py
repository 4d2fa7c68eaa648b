"""lm-eval asks, arm by arm: any of its tasks and ours, with every answer kept."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foldmoe.evaluate.result import Sample, TaskResult
from foldmoe.evaluate.skills import TINY_V4, runs_past_end

if TYPE_CHECKING:
    from foldmoe.evaluate.request import Request

TASKS = Path(__file__).parent / "tasks"
"""Our tasks, for ``lm_eval --include_path`` too."""

_OURS = "foldmoe_"

_PROTOCOLS = {"gpqa_diamond": "foldmoe_gpqa_diamond"}
"""Names that are no task of lm-eval, which has several ways to ask these questions, to the published protocol's."""

_USUAL_LIMIT = 256
"""New tokens where neither the task nor the user says: what lm-eval itself does."""


def require() -> str:
    """lm-eval's name and version.

    Raises:
        ValueError: it is not installed.
    """
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise ValueError(
            "these tasks need lm-eval: pip install 'foldmoe[eval]'. needle and arithmetic run without it, in process"
        ) from error
    return f"lm-eval {metadata.version('lm_eval')}"


def in_process(model: Any, tokenizer: Any, request: Request, progress: Callable[[int], None]) -> Any:
    """A loaded Transformers model as lm-eval takes it."""
    from foldmoe.evaluate.lm_models import InProcess

    template = request.generation.get("chat_template_kwargs", {})
    return InProcess(
        model, tokenizer, batch=request.batch, think_end=request.think_end, template=template, progress=progress
    )


def served(server: dict[str, str], request: Request, progress: Callable[[int], None]) -> Any:
    """A server as lm-eval takes it. Texts go out as texts: the server tokenises, as for any user."""
    from foldmoe.evaluate.lm_models import ServedChat, ServedCompletions

    tokenizer = request.checkpoint
    common: dict[str, Any] = {
        "model": server["model"],
        "tokenizer": tokenizer,
        "tokenizer_backend": "huggingface" if tokenizer else "none",
        "tokenized_requests": False,
        "num_concurrent": request.concurrency,
        "max_gen_toks": _USUAL_LIMIT,
        "seed": request.seed,
        "think_end": request.think_end,
        "progress": progress,
        "timeout": 3600,
    }
    if request.chat:
        return ServedChat(base_url=f"{server['url']}/chat/completions", **common)
    return ServedCompletions(base_url=f"{server['url']}/completions", **common)


@cache
def _manager(only_ours: bool, facts: str) -> Any:
    """lm-eval's list of tasks. Reading its own thousands takes seconds: once, and not for ours and single files."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(TASKS), include_defaults=not only_ours, metadata=json.loads(facts))


@dataclass
class Harness:
    """The tasks of a request, loaded once and asked of every arm."""

    request: Request
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # its warnings are about options that are set on purpose
        logging.getLogger("lm_eval.models.api_models").setLevel(logging.WARNING)  # a server's own words on a failure
        self.tasks: dict[str, Any] = {}
        for name in self.request.tasks:
            self.tasks |= self._load(name)

    def _load(self, name: str) -> dict[str, Any]:
        """One task, or the tasks of a group."""
        name = _PROTOCOLS.get(name, name)
        tokenizer = self.request.checkpoint or (str(TINY_V4) if self.request.arms else None)
        facts: dict[str, Any] = {"tokenizer": tokenizer} if tokenizer else {}
        if self.request.lengths:
            facts["max_seq_lengths"] = list(self.request.lengths)
        if Path(name).stem.startswith(_OURS):
            facts["seed"] = self.request.seed  # chooses the items; foreign tasks may not know the word
        own = name.startswith(_OURS) or Path(name).is_file()
        self.manager = manager = _manager(own, json.dumps(facts))
        if not own and name not in manager.all_tasks:
            near = ", ".join(sorted(task for task in manager.all_tasks if task.startswith(name))[:8])
            there = f"it has {near}" if near else "`lm-eval ls tasks` lists its tasks"
            raise ValueError(f"{name!r} is no task of lm-eval and no file; {there}")
        try:
            found: dict[str, Any] = manager.load([name])["tasks"]
        except Exception as error:
            raise ValueError(f"task {name}: its data cannot be had here: {type(error).__name__}: {error}") from error
        return found

    @property
    def answers(self) -> int | None:
        """How many answers an arm will write; None where some task compares likelihoods instead."""
        if any(task.config.output_type != "generate_until" for task in self.tasks.values()):
            return None
        chosen = self._chosen()
        return sum(len(chosen[name]) if chosen else len(task.eval_docs) for name, task in self.tasks.items())

    def _chosen(self) -> dict[str, list[int]] | None:
        """The first items of every task, and of every length of RULER's; None: all."""
        if self.request.items is None:
            return None
        chosen: dict[str, list[int]] = {}
        for name, task in self.tasks.items():
            docs = task.eval_docs
            several = "max_length" in getattr(docs, "column_names", ())
            lengths = docs["max_length"] if several else [0] * len(docs)
            seen = Counter[int]()
            chosen[name] = []
            for number, length in enumerate(lengths):
                if seen[length] < self.request.items:
                    chosen[name].append(number)
                seen[length] += 1
        return chosen

    def ask(self, lm: Any, *, chat_api: bool = False) -> dict[str, TaskResult]:
        """Every task's answers from one model; ``chat_api``: one whose server applies the chat template."""
        from lm_eval import simple_evaluate

        request = self.request
        settings = dict(request.generation)
        if not chat_api:
            settings.pop("chat_template_kwargs", None)  # the template is applied here, or not at all
        if request.max_tokens:
            settings["max_gen_toks"] = request.max_tokens
        found = simple_evaluate(
            model=lm,
            tasks=list(self.tasks.values()),
            task_manager=self.manager,
            num_fewshot=request.shots,
            samples=self._chosen(),
            apply_chat_template=request.chat,
            fewshot_as_multiturn=request.chat,
            gen_kwargs=settings or None,
            bootstrap_iters=0,  # standard errors come from the answers themselves
            log_samples=True,
            random_seed=request.seed,
            numpy_random_seed=request.seed,
            torch_random_seed=request.seed,
            fewshot_random_seed=request.seed,
        )
        results: dict[str, TaskResult] = {}
        for name, logged in found["samples"].items():
            results |= self._read(name, logged, found)
        return results

    def ask_server(self, arm: str, server: dict[str, str], progress: Callable[[int], None]) -> dict[str, TaskResult]:
        """Every task's answers from a running server.

        Raises:
            ValueError: it stopped answering, or refused a request.
        """
        from aiohttp import ClientError

        try:
            return self.ask(served(server, self.request, progress), chat_api=self.request.chat)
        except (OSError, ClientError) as error:  # the errors of requests are OSErrors
            raise ValueError(f"arm {arm}: the server at {server['url']} failed: {error}") from error

    def _read(self, name: str, logged: list[dict[str, Any]], found: Any) -> dict[str, TaskResult]:
        config = self.tasks[name].config
        higher = found["higher_is_better"].get(name, {})
        strict = _strict(config.filter_list)
        by_item: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for row in logged:
            by_item[row["doc_id"]].append(row)
        filters = {row["filter"] for row in logged}
        parts: dict[str, list[Sample]] = defaultdict(list)
        for number, rows in sorted(by_item.items()):
            scores: dict[str, float] = {}
            part = name
            for row in rows:
                for metric in row["metrics"]:
                    value = row[metric]
                    if not isinstance(value, (bool, int, float)) or higher.get(metric) is False or value == -1:
                        continue
                    if metric.isdigit():  # RULER names its scores by the length of the text, in tokens
                        part, metric = f"{name} @ {metric}", "match"
                    scores[_name(metric, row["filter"], filters, row["metrics"])] = float(value)
            if scores:
                parts[part].append(_sample(number, rows[0], scores, strict, name.startswith(_OURS)))
        if not parts:
            self.notes.append(f"{name} has no score of single items, so its arms cannot be paired; left out")
        writes = config.output_type == "generate_until"
        settings = dict(config.generation_kwargs or {})
        limit = settings.get("max_gen_toks") or settings.get("max_tokens") or _USUAL_LIMIT
        return {
            part: TaskResult(
                tuple(samples),
                str(found["versions"].get(name)),
                int(limit) if writes else None,
                int(found["n-shot"].get(name) or 0),
                settings if writes else {},
            )
            for part, samples in parts.items()
        }


def _sample(number: int, row: dict[str, Any], scores: dict[str, float], strict: _Past | None, own: bool) -> Sample:
    answer = row["resps"][0][0]
    text = str(answer) if isinstance(answer, str) else ""
    return Sample(
        id=number,
        prompt_hash=row["prompt_hash"],
        scores=scores,
        text=text,
        finish=getattr(answer, "finish", "unknown"),
        tokens=getattr(answer, "tokens", None),
        past_end=strict is not None and strict(text),
        group=row["doc"].get("group", "") if own else "",
    )


_Past = Callable[[str], bool]


def _strict(filters: list[dict[str, Any]] | None) -> _Past | None:
    """Whether a text goes on after the answer that the task's strict filter takes; None where it has none."""
    for entry in filters or ():
        for step in entry["filter"]:
            if entry["name"].startswith("strict") and step["function"] == "regex":
                pattern, which = step["regex_pattern"], step.get("group_select", 0)
                return lambda text: runs_past_end(text, pattern, which)
    return None


def _name(metric: str, used: str, filters: set[str], metrics: list[str]) -> str:
    """The filter's name where a task has one metric, the metric's where it has one filter, else both."""
    if used == "none" or (len(filters) == 1 and not re.match("strict|flexible", used)):
        return metric
    return used if len(metrics) == 1 else f"{metric}, {used}"
