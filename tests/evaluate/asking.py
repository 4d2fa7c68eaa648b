"""A run of lm-eval's tasks against a stand-in server, for the tests of what becomes of answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foldmoe.evaluate.request import from_options
from foldmoe.evaluate.run import run
from tests.evaluate.serving import Reply, serve

if TYPE_CHECKING:
    from foldmoe.evaluate.result import EvalResult


class Quiet:
    """Steps that count what they are told."""

    def __init__(self) -> None:
        self.done: dict[str, int] = {}
        self.totals: dict[str, int | None] = {}

    def step(self, label: str, total: int | None) -> Any:
        self.totals[label] = total

        def advance(done: int) -> None:
            self.done[label] = self.done.get(label, 0) + done

        return advance


def ask(reply: Reply, **options: Any) -> EvalResult:
    with serve(reply) as url:
        return run(from_options(server={"native": url}, **options), Quiet())
