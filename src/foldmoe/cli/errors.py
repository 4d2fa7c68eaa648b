"""Errors for people: one line on stderr and exit status 2, no traceback."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from foldmoe.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn


@contextmanager
def shown() -> Iterator[None]:
    """Turn what a user can do something about into a message; anything else stays a traceback."""
    try:
        yield
    except (CheckpointError, ValueError, OSError) as error:
        typer.echo(f"foldmoe: {error}", err=True)
        raise typer.Exit(2) from error


def failed(message: str) -> NoReturn:
    """End with exit status 1 and a line on stderr: what was asked was done in part, or not at all."""
    typer.echo(f"foldmoe: {message}", err=True)
    raise typer.Exit(1)
