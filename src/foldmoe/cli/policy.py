"""The policy that a command runs with: the environment's, and what the command line says on top of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from foldmoe import settings
from foldmoe.planner import FusionPolicy


def asked(**options: Any) -> FusionPolicy:
    """``options`` by the fields of :class:`FusionPolicy`; None leaves what the environment says.

    Raises:
        ValueError: an unknown choice, here or in the environment.
    """
    return replace(settings.read().policy, **{name: value for name, value in options.items() if value is not None})
