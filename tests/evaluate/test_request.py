"""Requests: presets, the command that repeats a run, and options that do not go together."""

from __future__ import annotations

from typing import Any

import pytest

from foldmoe.evaluate.presets import NIAH, PRESETS
from foldmoe.evaluate.request import Request, from_options

URL = "http://localhost:8000/v1"


def test_gsm8k_follows_the_published_protocol() -> None:
    asked = from_options(preset="gsm8k", server={"native": URL})
    assert (asked.tasks, asked.shots, asked.chat, asked.max_tokens) == (("gsm8k",), 5, True, 1024)
    assert (asked.concurrency, asked.seed, asked.items) == (64, 123, None)
    assert asked.generation["temperature"] == 0.0
    assert asked.generation["chat_template_kwargs"]["thinking"] is False


@pytest.mark.parametrize("preset", ["gpqa-diamond", "mmlu-pro"])
def test_thinking_presets_sample(preset: str) -> None:
    asked = from_options(preset=preset, server={"native": URL})
    assert asked.generation["temperature"] == asked.generation["top_p"] == 1.0
    assert asked.generation["do_sample"] is True
    assert asked.generation["chat_template_kwargs"]["thinking"] is True


def test_niah_asks_eight_tasks_at_every_length() -> None:
    asked = from_options(preset="niah", server={"native": URL}, lengths=(4096,))
    assert asked.tasks == NIAH
    assert len(set(NIAH)) == 8
    assert asked.lengths == (4096,)


def test_an_unknown_preset_is_named() -> None:
    with pytest.raises(ValueError, match="no preset 'gsm9k'; there are: gsm8k"):
        from_options(preset="gsm9k", arms=("serial",))


@pytest.mark.parametrize(
    ("options", "command"),
    [
        ({"arms": ("serial", "native")}, "foldmoe eval --arms serial,native"),
        ({"arms": ("serial",), "checkpoint": "a b", "items": 5}, "foldmoe eval 'a b' --arms serial --items 5"),
        (
            {"preset": "gsm8k", "server": {"native": URL}, "concurrency": 8, "chat": False},
            f"foldmoe eval --server native={URL} --preset gsm8k --no-chat --concurrency 8",
        ),
    ],
)
def test_the_command_repeats_the_request(options: dict[str, Any], command: str) -> None:
    assert from_options(**options).command == command


def test_presets_only_name_options_that_exist() -> None:
    for options in PRESETS.values():
        Request(arms=("serial",), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nobody to ask"),
        ({"arms": ("native",), "server": {"native": URL}, "tasks": ("gsm8k",)}, "native: both in process and served"),
        ({"server": {"native": URL}}, "a server is asked through lm-eval: its tasks are foldmoe_needle"),
        ({"arms": ("serial",), "state_dir": {"native": "x"}}, "--state-dir of native, which no --server names"),
        ({"arms": ("serial",), "tasks": ("needle", "gsm8k")}, "needle run without lm-eval"),
        (
            {"arms": ("serial",), "server": {"native": URL}, "tasks": ("gsm8k",), "chat": True},
            r"in process \(serial\) and served \(native\) arms with --chat, .*add --no-chat",
        ),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"items": 0}, "--items must be at least 1, found 0"),
        ({"items": -1}, "--items must be at least 1, found -1"),
        ({"batch": 0}, "--batch must be at least 1, found 0"),
        ({"max_tokens": 0}, "--max-tokens must be at least 1, found 0"),
        ({"concurrency": 0}, "--concurrency must be at least 1, found 0"),
        ({"shots": -1}, "--shots must be at least 0, found -1"),
        ({"lengths": (4096, -4)}, "--lengths must be at least 1, found 4096,-4"),
        ({"margin": -1.0}, "--margin must be between 0 and 1, found -1.0"),
        ({"margin": float("nan")}, "--margin must be between 0 and 1, found nan"),
        ({"arms": ("native", "serial", "native")}, "--arms names native more than once"),
    ],
)
def test_numbers_out_of_range_and_arms_twice_are_refused_by_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Request(**{"arms": ("serial",), **options})
