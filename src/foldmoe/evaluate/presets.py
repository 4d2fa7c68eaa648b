"""Protocols that engines' accuracy reports follow, as options of a request.

``gsm8k`` is the protocol of the native fold's report, the others are what the slot fold's report names. Token limits of
the thinking presets are ours, since none was published: long enough that an answer cut by length is the exception.
"""

from __future__ import annotations

from typing import Any

NIAH = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multiquery",
    "niah_multivalue",
)
"""RULER's needle-in-a-haystack tasks. All but single_1, multikey_2 and multikey_3 fetch essays to hide it in."""


def _thinking(on: bool) -> dict[str, Any]:
    # DeepSeek's templates read the first name, Qwen's and GLM's the second.
    return {"chat_template_kwargs": {"thinking": on, "enable_thinking": on}}


def _thoughtful(task: str) -> dict[str, Any]:
    return {
        "tasks": (task,),
        "shots": 0,
        "chat": True,
        "max_tokens": 32768,
        "concurrency": 64,
        "think_end": "</think>",
        "generation": {"do_sample": True, "temperature": 1.0, "top_p": 1.0, **_thinking(True)},
    }


PRESETS: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "tasks": ("gsm8k",),
        "shots": 5,
        "chat": True,
        "max_tokens": 1024,
        "concurrency": 64,
        "seed": 123,
        "generation": {"temperature": 0.0, **_thinking(False)},
    },
    "gpqa-diamond": _thoughtful("foldmoe_gpqa_diamond"),
    "mmlu-pro": _thoughtful("foldmoe_mmlu_pro"),
    "niah": {"tasks": NIAH, "lengths": (4096, 8192, 16384, 32768, 65536, 131072), "concurrency": 64},
}
"""By name; ``gsm8k`` asks for the full split of 1319 items, which takes ``items=None``."""
