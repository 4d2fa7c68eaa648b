"""``foldmoe doctor``: what this machine can run, and why not more."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from foldmoe.cli import errors
from foldmoe.cli.console import console
from foldmoe.doctor import examine, examine_command
from foldmoe.integrations.vllm.deployments import DEPLOYMENTS
from foldmoe.report.doctor_table import doctor_table


def doctor(
    command: Annotated[
        Optional[list[str]], typer.Argument(help="After --, a command: what to change so that it folds.")  # noqa: UP045
    ] = None,
    deployment: Annotated[
        str, typer.Option(help=f"Print the commands of a published deployment: {', '.join(DEPLOYMENTS)}.")
    ] = "",
) -> None:
    """Say what this machine can run and why not more; or what a `-- vllm serve ...` command has to change.

    Exit status 1 if vLLM is installed and its servers would run without foldmoe's plugin.
    """
    with errors.shown():
        if deployment:
            if deployment not in DEPLOYMENTS:
                raise ValueError(f"no deployment {deployment!r}; there are: {', '.join(DEPLOYMENTS)}")
            print("\n".join(DEPLOYMENTS[deployment].lines()))
            return
        findings = examine_command(command) if command else examine()
        console().print(doctor_table(findings))
    if any(finding.broken for finding in findings):
        raise typer.Exit(1)
