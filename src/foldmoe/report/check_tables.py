"""Tables of ``foldmoe verify`` and ``foldmoe requantize``: a row a layer, every problem under its layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.checkpoint.compare import LayerDifference
    from foldmoe.checkpoint.requantize import Requantized
    from foldmoe.verify import LayerCheck


def _table(*headings: str) -> Table:
    table = Table()
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _problems(layer: str, problems: Sequence[str]) -> list[Text]:
    return [Text(f"{layer}: {problem}", style="red") for problem in problems]


def verify_table(checks: Sequence[LayerCheck]) -> RenderableType:
    """Errors of every layer, problems, and how many pass."""
    table = _table("layer", "how", "folded", "unfolded", "shared alone", "folded/unfolded", "allowed", "")
    problems: list[Text] = []
    for check in checks:
        if check.skipped:
            table.add_row(check.layer, "not read", "", "", "", "", "", "skipped")
            problems.append(Text(f"{check.layer}: skipped: {check.how}"))
            continue
        numbers = (check.folded, check.unfolded, check.shared, check.agreement, check.tolerance)
        cells = ["" if n is None or not check.tolerance else f"{n:.1e}" for n in numbers]  # blank: nothing was computed
        if not check.folds:
            cells[0] = cells[3] = ""
        verdict = "not folded" if check.refused else "ok"
        table.add_row(check.layer, check.how, *cells, verdict if check.ok else "FAILS")
        if check.refused:
            problems.append(Text(f"{check.layer}: the fold that was asked for was not run: {check.refused}"))
        problems += _problems(check.layer, check.problems)
    layers = [check for check in checks if not check.whole]
    passed, skipped = sum(c.ok and not c.skipped for c in layers), sum(c.skipped for c in layers)
    summary = f"{passed}/{len(layers)} layers compute what the checkpoint says"
    if refused := sum(bool(check.refused) for check in layers):
        summary += f", {refused} not folded as asked"
    return Group(table, *problems, Text(summary + (f", {skipped} skipped" if skipped else ""), style="bold"))


def compare_table(differences: Sequence[LayerDifference]) -> RenderableType:
    """A derived checkpoint against its original."""
    table = _table("layer", "routed", "shared", "RMS", "gain", "")
    problems: list[Text] = []
    for d in differences:
        table.add_row(d.layer, d.routed, d.shared, f"{d.rms:.4f}", f"{d.gain:.4f}", "ok" if d.ok else "FAILS")
        problems += _problems(d.layer, d.problems)
    passed = sum(d.ok for d in differences)
    return Group(table, *problems, Text(f"{passed}/{len(differences)} layers match the original", style="bold"))


ON_HOPPER = (
    "on a Hopper GPU run this copy with --fold slot (FOLDMOE_FOLD=slot), which loses nothing more and stays on the "
    "hopper backend; auto takes triton there, since hopper folds no MXFP4 shared expert natively"
)


def requantize_table(done: Requantized) -> RenderableType:
    """What requantising cost, layer by layer."""
    table = _table("layer", "was", "RMS", "worst block", "bytes before", "after")
    for loss in done.losses:
        table.add_row(
            loss.layer,
            loss.before.value,
            f"{loss.rms:.4f}",
            f"{loss.worst:.4f}",
            f"{loss.bytes_before:,}",
            f"{loss.bytes_after:,}",
        )
    lines = [Text(f"kept {line}") for line in done.kept]
    if done.left:
        lines.append(Text(f"not copied: {', '.join(done.left)}"))
    lines.append(Text(ON_HOPPER))
    worst = max(done.losses, key=lambda loss: loss.rms)
    count = len(done.losses)
    summary = f"{count} shared experts are mxfp4 now, RMS up to {worst.rms:.4f} ({worst.layer}); in {done.out}"
    return Group(table, *lines, Text(summary, style="bold"))
