"""Where commands print tables."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_PIPED_WIDTH = 120


def console() -> Console:
    """A console as wide as the terminal; a pipe or a file, which has no width, gets room for every column."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(width=_PIPED_WIDTH if piped else None)
