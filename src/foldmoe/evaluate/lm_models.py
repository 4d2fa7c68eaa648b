"""Models for lm-eval that say why each answer ended. Needs lm-eval; :mod:`foldmoe.evaluate.harness` imports this late.

lm-eval keeps answers as plain strings and drops the reason. Here an answer is a string that carries it, which survives
batching, concurrency and reordering without any bookkeeping.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.models.utils import postprocess_generated_text

from foldmoe.evaluate.generation import generate

if TYPE_CHECKING:
    from collections.abc import Callable

    from foldmoe.evaluate.result import Finish

    Progress = Callable[[int], None]


class Answer(str):
    """An answer's text with why it ended and its new tokens (None where nobody counted)."""

    finish: Finish
    tokens: int | None

    def __new__(cls, text: str, finish: Finish, tokens: int | None) -> Answer:
        answer = super().__new__(cls, text)
        answer.finish, answer.tokens = finish, tokens
        return answer


class InProcess(HFLM):  # type: ignore[misc]
    """A Transformers model in memory. Prompts that do not fit are an error, never cut."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        batch: int,
        think_end: str | None,
        template: dict[str, Any],
        progress: Progress,
    ) -> None:
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            backend="causal",
            batch_size=batch,
            think_end_token=think_end,
            chat_template_args=template,
        )
        self._templated = False
        self._progress = progress

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        self._templated = True  # the template has written the special tokens already
        return super().apply_chat_template(*args, **kwargs)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers: dict[int, Answer] = {}
        for numbers in alike.values():
            settings = dict(requests[numbers[0]].args[1])
            stop = settings.pop("until", None) or []
            limit = settings.pop("max_gen_toks", None) or settings.pop("max_tokens", None) or self.max_gen_toks
            sampled = settings.pop("do_sample", False)
            if not sampled:
                settings = {}  # temperature and top_p mean nothing to a greedy answer
            said = generate(
                self.model,
                self.tokenizer,
                [requests[number].args[0] for number in numbers],
                token_limit=limit,
                stop=[stop] if isinstance(stop, str) else stop,
                batch=self.batch_size,
                special_tokens=not self._templated,
                progress=self._progress,
                do_sample=sampled,
                **settings,
            )
            for number, one in zip(numbers, said, strict=True):
                text = postprocess_generated_text(one.text, None, self.think_end_token)
                answers[number] = Answer(text, one.finish, len(one.tokens))
        return [answers[number] for number in range(len(requests))]


def _answers(texts: list[str | None], outputs: Any) -> list[Answer]:
    """``texts`` of a server's replies, in their order, with what each reply says about its end."""
    replies = outputs if isinstance(outputs, list) else [outputs]
    choices = [(r, c) for r in replies for c in sorted(r["choices"], key=lambda c: int(c["index"]))]
    found = []
    for text, (reply, choice) in zip(texts, choices, strict=True):
        said = choice.get("finish_reason")
        finish: Finish = said if said in ("stop", "length") else "unknown"
        usage = reply.get("usage") or {}
        tokens = usage.get("completion_tokens") if len(reply["choices"]) == 1 else None
        found.append(Answer(text or "", finish, tokens))
    return found


def _payload(payload: dict[str, Any]) -> dict[str, Any]:
    """Without an empty list of stop strings, at which Transformers' server fails."""
    return payload if payload.get("stop") else {key: value for key, value in payload.items() if key != "stop"}


class ServedCompletions(LocalCompletionsAPI):  # type: ignore[misc]
    """A server's ``/completions``."""

    def __init__(self, *, think_end: str | None, progress: Progress, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._think_end, self._progress = think_end, progress

    def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _payload(super()._create_payload(*args, **kwargs))

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        texts = [text or "" for text in LocalCompletionsAPI.parse_generations(outputs, **kwargs)]
        self._progress(len(texts))
        return list(_answers([postprocess_generated_text(t, None, self._think_end) for t in texts], outputs))


class ServedChat(LocalChatCompletion):  # type: ignore[misc]
    """A server's ``/chat/completions``."""

    def __init__(self, *, think_end: str | None, progress: Progress, **kwargs: Any) -> None:
        super().__init__(think_end_token=think_end, **kwargs)
        self._progress = progress

    def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return _payload(super()._create_payload(*args, **kwargs))

    def parse_generations(self, outputs: Any, **kwargs: Any) -> list[str]:
        texts = super().parse_generations(outputs, **kwargs)
        self._progress(len(texts))
        return list(_answers(texts, outputs))
