"""What options of commands may be; a mistake is named by the option, with what was found."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def in_range(low: float, high: float = math.inf, /, **given: Any) -> None:
    """Numbers from ``low`` to ``high``, both included, each under its option's name.

    Args:
        given: a number; a tuple of at least one, each of which is checked; None, for an option that was not given.

    Raises:
        ValueError: a number outside, NaN, or an empty tuple.
    """
    for name, value in given.items():
        several = value if isinstance(value, tuple) else (value,)
        if several and all(one is None or low <= one <= high for one in several):
            continue
        found = ",".join(map(str, several)) or "none"
        wanted = f"at least {low}" if math.isinf(high) else f"between {low} and {high}"
        raise ValueError(f"{_flag(name)} must be {wanted}, found {found}")


def distinct(name: str, values: Sequence[str]) -> None:
    """No value twice: what is compared with itself says nothing.

    Raises:
        ValueError: naming the option and what it names twice.
    """
    if twice := [value for value in dict.fromkeys(values) if values.count(value) > 1]:
        raise ValueError(f"{_flag(name)} names {', '.join(twice)} more than once")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
