"""Numbers on the command line."""

from __future__ import annotations


def numbers(option: str, text: str) -> tuple[int, ...]:
    """``1,8,32`` as numbers.

    Raises:
        ValueError: naming the option, for anything else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{option} takes whole numbers with commas between, such as 1,8,32; found {text!r}") from error
