"""One self-contained page of everything that was measured: ``foldmoe report``."""

from foldmoe.report.page.render import render

__all__ = ["render"]
