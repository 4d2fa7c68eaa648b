"""Names on the command line."""

from __future__ import annotations


def names(option: str, text: str) -> tuple[str, ...]:
    """``serial,native`` as names; spaces around them do not count.

    Raises:
        ValueError: naming the option, where one of them is empty.
    """
    found = tuple(part.strip() for part in text.split(","))
    if not all(found):
        raise ValueError(f"{option} takes names with commas between; found {text!r}")
    return found
