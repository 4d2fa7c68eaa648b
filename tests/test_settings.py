"""The environment: what is read, and that a misspelt switch never passes for a working one."""

from __future__ import annotations

from pathlib import Path

import pytest

from foldmoe import FusionPolicy
from foldmoe.settings import read


def test_nothing_set_is_the_default_policy() -> None:
    assert read({"PATH": "/bin"}).policy == FusionPolicy()


def test_every_variable_is_read() -> None:
    found = read(
        {
            "FOLDMOE_FOLD": "slot",
            "FOLDMOE_BACKEND": "torch",
            "FOLDMOE_ACTIVATIONS": "bf16",
            "FOLDMOE_ALLOW_REQUANTIZE": "1",
            "FOLDMOE_COMPILE_AHEAD": "0",
            "FOLDMOE_CACHE_DIR": "kernels",
            "FOLDMOE_STATE_DIR": "state",
        }
    )
    assert found.policy == FusionPolicy("slot", True, "bf16", "torch")
    assert (found.cache_dir, found.state_dir) == (Path("kernels"), Path("state"))
    assert not found.compile_ahead


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("FOLDMOE_FOLD", "nativ", "fold must be one of auto, native"),
        ("FOLDMOE_ACTIVATIONS", "int8", "activations must be one of"),
        ("FOLDMOE_ALLOW_REQUANTIZE", "maybe", "must be 1 or 0, found 'maybe'"),
        ("FOLDMOE_COMPILE_AHEAD", "2", "must be 1 or 0, found '2'"),
        ("FOLDMOE_FLOD", "native", "unknown FOLDMOE_FLOD; known: FOLDMOE_ACTIVATIONS"),
    ],
)
def test_values_that_are_not_known_are_refused(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read({variable: value})


@pytest.mark.parametrize("value", ["0", "false", "", "no"])
def test_requantising_stays_off(value: str) -> None:
    assert not read({"FOLDMOE_ALLOW_REQUANTIZE": value}).policy.allow_requantize


@pytest.mark.parametrize(("value", "ahead"), [("", True), ("1", True), ("on", True), ("0", False), ("off", False)])
def test_servers_compile_ahead_unless_told_not_to(value: str, ahead: bool) -> None:
    assert read({"FOLDMOE_COMPILE_AHEAD": value}).compile_ahead is ahead
