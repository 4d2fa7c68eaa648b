"""``foldmoe serve``: Transformers' own server over folded models."""

from __future__ import annotations

import typer

from foldmoe import settings
from foldmoe.cli import errors


def serve(context: typer.Context) -> None:
    """Run 'transformers serve' with MoE blocks folded: every argument is its own, see 'foldmoe serve --help'.

    How layers run is taken from FOLDMOE_FOLD and its like. Needs the extra serve.
    """
    from foldmoe.integrations.transformers.serving import serve as run

    with errors.shown():
        run(context.args, settings.read().policy)
