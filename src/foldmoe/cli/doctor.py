"""``foldmoe doctor``: what this machine can run, and why not more."""

from __future__ import annotations

from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.doctor import examine
from foldmoe.report.doctor_table import doctor_table


def doctor() -> None:
    """Say what this machine can run and why not more."""
    with errors.shown():
        console().print(doctor_table(examine()))
