"""The one reader of the environment.

| variable | values |
| --- | --- |
| ``FOLDMOE_FOLD`` | auto, native, slot, dual, off, stock |
| ``FOLDMOE_BACKEND`` | auto, torch, triton, hopper |
| ``FOLDMOE_ACTIVATIONS`` | checkpoint, bf16, fp8, fp8_token |
| ``FOLDMOE_ALLOW_REQUANTIZE`` | 1 lets the slot fold lower a shared expert's precision |
| ``FOLDMOE_COMPILE_AHEAD`` | 0 keeps a server from compiling kernels for every batch size while it starts |
| ``FOLDMOE_CACHE_DIR`` | where kernels of this package are kept once compiled; Triton's own folder where not set |
| ``FOLDMOE_STATE_DIR`` | where a server's ranks write what they run |
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foldmoe.planner import FusionPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping

PREFIX = "FOLDMOE_"
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_POLICY = {"FOLD": "fold", "BACKEND": "backend", "ACTIVATIONS": "activations"}
_PATHS = {"CACHE_DIR": "cache_dir", "STATE_DIR": "state_dir"}
_FLAGS = {"ALLOW_REQUANTIZE": False, "COMPILE_AHEAD": True}


@dataclass(frozen=True)
class Settings:
    """What the environment asks for."""

    policy: FusionPolicy
    cache_dir: Path | None = None
    state_dir: Path | None = None
    compile_ahead: bool = True


def read(environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from ``environment`` (the process's own by default).

    Raises:
        ValueError: a value that is not known, or a ``FOLDMOE_`` variable that nobody reads: a misspelt switch must not
            pass for a working one.
    """
    env = os.environ if environment is None else environment
    found = {key.removeprefix(PREFIX): value for key, value in env.items() if key.startswith(PREFIX)}
    known = {*_POLICY, *_PATHS, *_FLAGS}
    if unknown := sorted(set(found) - known):
        raise ValueError(
            f"unknown {', '.join(PREFIX + name for name in unknown)}; "
            f"known: {', '.join(PREFIX + name for name in sorted(known))}"
        )
    choices: dict[str, Any] = {field: found[name] for name, field in _POLICY.items() if found.get(name)}
    flags = {name: _flag(name, found.get(name, ""), default) for name, default in _FLAGS.items()}
    try:
        policy = FusionPolicy(allow_requantize=flags["ALLOW_REQUANTIZE"], **choices)
    except ValueError as error:
        raise ValueError(f"{PREFIX.rstrip('_')} environment: {error}") from error
    paths = {field: Path(found[name]) for name, field in _PATHS.items() if found.get(name)}
    return Settings(policy, **paths, compile_ahead=flags["COMPILE_AHEAD"])


def _flag(name: str, value: str, default: bool) -> bool:
    if value == "":
        return default
    if value.lower() not in (*_TRUE, *_FALSE):
        raise ValueError(f"{PREFIX}{name} must be 1 or 0, found {value!r}")
    return value.lower() in _TRUE


def cache_dir() -> Path | None:
    """``FOLDMOE_CACHE_DIR`` alone: a misspelt variable is told by :func:`read`, not by the first launch of a kernel."""
    found = os.environ.get(f"{PREFIX}CACHE_DIR")
    return Path(found) if found else None
