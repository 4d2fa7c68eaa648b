"""Sections to one HTML page with nothing outside it: styles and drawings are in the page, there are no scripts."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.report.page.blocks import Section

_TEMPLATES = resources.files("foldmoe.report.page") / "templates"


def render(sections: Sequence[Section], title: str) -> str:
    """The page as text.

    Raises:
        ImportError: jinja2 is missing.
    """
    try:
        from jinja2 import DictLoader, Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("the HTML report needs jinja2: pip install 'foldmoe[report]'") from error
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in _TEMPLATES.iterdir()}
    environment = Environment(
        loader=DictLoader(texts), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page: str = environment.get_template("page.html").render(sections=sections, title=title)
    return page
