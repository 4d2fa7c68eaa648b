"""Triton decides between compiler and interpreter when a kernel is defined, so one process can have only one of them.

``interpreted/`` runs in processes of its own (``test_interpreter.py`` starts them, with ``TRITON_INTERPRET=1``); the
rest of this folder runs in processes without it.
"""

from __future__ import annotations

import os
from pathlib import Path

_HERE = Path(__file__).parent

if os.environ.get("TRITON_INTERPRET") == "1":
    collect_ignore = [str(path) for path in _HERE.glob("test_*.py")]
else:
    collect_ignore = [str(_HERE / "interpreted")]
