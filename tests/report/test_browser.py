"""The page in headless Chromium: quiet, alone, readable at three widths, light, dark and printed, by keys and ear."""

from __future__ import annotations

import shutil
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PLACES = [(width, scheme) for width in (400, 900, 1600) for scheme in ("light", "dark")]

_CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
_QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip

_TEXTS = """() => [...document.querySelectorAll('svg.chart')].map(svg => {
  const box = e => { const b = e.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom] }
  return {svg: box(svg), texts: [...svg.querySelectorAll('text')].map(t => [t.textContent, ...box(t)])}
})"""

_COLOURS = """() => {
  const of = (e, name) => getComputedStyle(e)[name]
  const seen = [...document.querySelectorAll('.shape, p, td, th, dt, a, figcaption, svg text')]
  return {page: of(document.body, 'backgroundColor'), seen: [...new Set(seen.map(e =>
    (e.matches('.shape') ? 'shape ' : 'text ') + (e.matches('svg text, .shape') ? of(e, 'fill') : of(e, 'color'))))]}
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="the page is only tested with pip install playwright")
    program = next((found for name in _CHROMIUM if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(
            f"the page is only tested with a browser: none of {', '.join(_CHROMIUM)} (apt-get install chromium)"
        )
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=list(_QUIET))
        yield started
        started.close()


@contextmanager
def _opened(browser: Any, page: Path, width: int = 900, scheme: str = "light") -> Iterator[Any]:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        tab = context.new_page()
        tab.heard = []
        tab.asked = []
        tab.on("console", lambda message: tab.heard.append(message.text))
        tab.on("pageerror", lambda error: tab.heard.append(str(error)))
        tab.on("request", lambda request: tab.asked.append(request.url))
        tab.goto(page.as_uri())
        yield tab
    finally:
        context.close()


@pytest.mark.parametrize(("width", "scheme"), PLACES)
def test_it_is_quiet_asks_nobody_and_fits(browser: Any, page: Path, width: int, scheme: str) -> None:
    with _opened(browser, page, width, scheme) as tab:
        assert tab.heard == []
        assert [url for url in tab.asked if not url.startswith("data:")] == [page.as_uri()]
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [400, 900, 1600])
def test_words_of_charts_stay_apart_inside_and_readable(browser: Any, page: Path, width: int) -> None:
    with _opened(browser, page, width) as tab:
        charts = tab.evaluate(_TEXTS)
    assert len(charts) == 9
    for chart in charts:
        left, top, right, bottom = chart["svg"]
        assert (right - left) / 480 * 13 >= 9.5, "13 units high, drawn at that scale"
        for i, (word, *box) in enumerate(chart["texts"]):
            assert left - 1 <= box[0] < box[2] <= right + 1, word
            assert top - 1 <= box[1] < box[3] <= bottom + 1, word
            for other, *b in chart["texts"][i + 1 :]:
                apart = box[2] <= b[0] or b[2] <= box[0] or box[3] <= b[1] + 1 or b[3] <= box[1] + 1
                assert apart, f"{word!r} and {other!r} overlap"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_from_the_page(browser: Any, page: Path, scheme: str) -> None:
    """WCAG AA: 4.5 for words, 3 for drawings."""
    with _opened(browser, page, scheme=scheme) as tab:
        found = tab.evaluate(_COLOURS)
    ground = _luminance(found["page"])
    assert (ground < 0.2) == (scheme == "dark")
    for what, colour in (entry.split(" ", 1) for entry in found["seen"]):
        low, high = sorted((ground, _luminance(colour)))
        assert (high + 0.05) / (low + 0.05) >= (3 if what == "shape" else 4.5), f"{what} {colour}"


def _luminance(colour: str) -> float:
    """Relative luminance of ``rgb(r, g, b)``, as WCAG 2 defines it."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").removesuffix(")").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_keys_reach_the_results_and_every_table(browser: Any, page: Path) -> None:
    active = "document.activeElement"
    with _opened(browser, page) as tab:
        tab.keyboard.press("Tab")
        assert tab.evaluate(f"{active}.textContent") == "Skip to the results"
        assert tab.evaluate(f"getComputedStyle({active}).outlineStyle") == "solid"
        assert tab.evaluate(f"{active}.getBoundingClientRect().left") >= 0, "the link shows when it has the focus"
        tab.keyboard.press("Enter")
        assert tab.evaluate(f"{active}.id") == "main"
        reached = set()
        tables = tab.locator(".scroll").count()
        for _ in range(tables):
            tab.keyboard.press("Tab")
            reached.add(tab.evaluate(f"{active}.getAttribute('aria-labelledby')"))
        assert len(reached) == tables


def test_charts_and_tables_have_names_and_charts_are_told_in_words(browser: Any, page: Path) -> None:
    with _opened(browser, page) as tab:
        latency = tab.get_by_role("img", name="Latency against tokens")
        assert latency.count() == 2
        described = latency.first.locator("desc").text_content()
        assert "hopper folded: 46 at 1, 159 at 8" in described
        assert "floor: 24 at 1" in described
        assert tab.get_by_role("img").count() == tab.locator("svg.chart").count()
        for role in ("img", "table", "region"):
            for element in tab.get_by_role(role).all():
                names = element.get_attribute("aria-labelledby").split()
                assert all(tab.locator(f"[id='{name}']").text_content().strip() for name in names)
        levels = [
            int(name[1]) for name in tab.evaluate("[...document.querySelectorAll('h1,h2,h3')].map(h => h.tagName)")
        ]
        assert levels[0] == 1
        assert all(after - before <= 1 for before, after in pairwise(levels))


def test_a_phone_shows_a_plan_as_cards(browser: Any, page: Path) -> None:
    with _opened(browser, page, 400) as tab:
        plan = tab.locator(".stacks").first
        assert plan.evaluate("e => e.scrollWidth <= e.clientWidth"), "nothing to scroll for"
        assert "why not better" in plan.locator("td").last.evaluate("e => getComputedStyle(e, '::before').content")
        assert plan.get_by_role("cell").count() == plan.locator("td").count(), "still a table to a screen reader"


def test_print_is_light_without_links_and_cuts_nothing(browser: Any, page: Path) -> None:
    with _opened(browser, page, 1000, "dark") as tab:
        tab.emulate_media(media="print")
        assert _luminance(tab.evaluate(_COLOURS)["page"]) > 0.9
        assert not tab.locator("nav").is_visible()
        assert tab.pdf(prefer_css_page_size=True).startswith(b"%PDF")
        # A4 at 96 dots an inch, less the margins: what is wider would be cut off.
        tab.set_viewport_size({"width": 718, "height": 1000})
        widths = (
            "[...document.querySelectorAll('.scroll')].map(e => [e.scrollWidth, e.previousElementSibling.textContent])"
        )
        assert [found for found in tab.evaluate(widths) if found[0] > 718] == []
