"""What ``foldmoe doctor`` found, for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from foldmoe.doctor import Finding


def doctor_table(findings: list[Finding]) -> Table:
    """One row a finding."""
    table = Table(title="foldmoe doctor", title_justify="left")
    for heading in ("", "subject", "found", "why, what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        cells = ("yes" if finding.ok else "no", finding.subject, finding.found, finding.advice)
        table.add_row(*map(Text, cells))  # as text: [gpu] is an extra, not markup
    return table
