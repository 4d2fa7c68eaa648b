"""Progress: bars on a terminal, lines in a log."""

import io

from rich.console import Console

from foldmoe.cli.console import Bars


def test_a_log_says_what_begins_as_it_begins() -> None:
    log = io.StringIO()
    with Bars(Console(file=log)) as bars:
        done = bars.step("native: needle [300]", 50)
        assert log.getvalue() == "native: needle [300], 50\n"
        done(50)
        bars.step("loading tasks", None)
    assert log.getvalue() == "native: needle [300], 50\nloading tasks\n"


def test_a_terminal_shows_a_bar() -> None:
    screen = io.StringIO()
    with Bars(Console(file=screen, force_terminal=True, width=80)) as bars:
        bars.step("native [x]: needle", 50)(25)
    assert "25/50" in screen.getvalue()
    assert "native [x]: needle" in screen.getvalue()
