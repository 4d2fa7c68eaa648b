"""Two results of ``foldmoe bench layer``: which rows changed by more than the noise of both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from foldmoe.bench.result import LayerResult, Row

Verdict = Literal["slower", "faster", "within noise", "new", "gone", "too few rounds"]

FEWEST_ROUNDS = 4
"""Below it a result says nothing of its own noise."""


@dataclass(frozen=True)
class Change:
    """One arm at one number of tokens, before and after.

    Args:
        before, after: None where a row is in one result alone.
        noise: relative; the two rows' own, added; None where too few rounds leave it unknown.
    """

    before: Row | None
    after: Row | None
    noise: float | None
    verdict: Verdict

    @property
    def row(self) -> Row:
        """The newer of the two."""
        found = self.after or self.before
        assert found is not None
        return found

    @property
    def ratio(self) -> float | None:
        """Time after over time before."""
        return self.after.seconds / self.before.seconds if self.before and self.after else None


@dataclass(frozen=True)
class Comparison:
    """All changes, in the newer result's order, and what else differs between the two runs."""

    changes: tuple[Change, ...]
    differences: tuple[str, ...]

    @property
    def compared(self) -> int:
        """Rows that both results hold, in rounds enough to judge them."""
        return sum(change.verdict in ("slower", "faster", "within noise") for change in self.changes)

    @property
    def regressions(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict == "slower")


def compare(before: LayerResult, after: LayerResult) -> Comparison:
    """Put two runs of one layer side by side.

    A row is slower or faster where its median moved by more than both rows' noise (the arm against itself) together.

    Raises:
        ValueError: results of different layers, or without a row in common.
    """
    if before.spec != after.spec:
        raise ValueError(f"two layers cannot be compared: before, {before.spec}; after, {after.spec}")
    rounds = min(before.request.rounds, after.request.rounds)
    old = {(row.arm, row.tokens): row for row in before.rows}
    new = {(row.arm, row.tokens): row for row in after.rows}
    if not old.keys() & new.keys():
        raise ValueError(
            f"nothing to compare: no arm was timed at the same number of tokens in both; before, {_rows(before)}; "
            f"after, {_rows(after)}"
        )
    changes = [_change(old.get(key), row, rounds) for key, row in new.items()]
    changes += [_change(row, None, rounds) for key, row in old.items() if key not in new]
    return Comparison(tuple(changes), tuple(_differences(before, after)))


def _rows(result: LayerResult) -> str:
    """What was timed, in words."""
    if not result.rows:
        return "no row"
    arms, tokens = (dict.fromkeys(getattr(row, name) for row in result.rows) for name in ("arm", "tokens"))
    return f"{', '.join(arms)} at {', '.join(map(str, tokens))} tokens"


def _change(before: Row | None, after: Row | None, rounds: int) -> Change:
    noise = sum(row.noise for row in (before, after) if row)
    known = None if rounds < FEWEST_ROUNDS else noise
    if before is None or after is None:
        return Change(before, after, known, "new" if before is None else "gone")
    if known is None:
        return Change(before, after, known, "too few rounds")
    moved = after.seconds / before.seconds - 1
    verdict: Verdict = "within noise" if abs(moved) <= noise else "faster" if moved < 0 else "slower"
    return Change(before, after, noise, verdict)


def _differences(before: LayerResult, after: LayerResult) -> list[str]:
    """What may explain a change other than the code: versions, ceilings, how it was asked."""
    lines = []
    for name in sorted(before.versions.keys() | after.versions.keys()):
        one, two = (result.versions.get(name, "none") for result in (before, after))
        if one != two:
            lines.append(f"{name}: {one} before, {two} after")
    for name, unit, scale in (("read_bandwidth", "GB/s", 1e9), ("matmul", "TFLOP/s", 1e12)):
        one, two = (getattr(result.ceilings, name) / scale for result in (before, after))
        if abs(two / one - 1) > 0.02:
            lines.append(f"ceiling {name}: {one:,.2f} {unit} before, {two:,.2f} after")
    if before.command != after.command:
        lines.append(f"command: {before.command} before, {after.command} after")
    return lines
