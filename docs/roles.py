"""For the API page: docstrings name things as ``:class:`Name```, which Markdown would print as it is."""

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:class|func|meth|attr|data|mod):`~?([^`]+)`")


class Roles(griffe.Extension):
    """Roles to code spans."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = _ROLE.sub(r"`\1`", obj.docstring.value)
