"""``interpreted/`` runs under ``TRITON_INTERPRET=1``, in a process of its own that test_remap.py starts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from foldmoe.planner import capability
from tests.parallel.support import register_rows
from tests.parallel.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Iterator

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore = [str(Path(__file__).parent / "interpreted")]


@pytest.fixture(scope="package", autouse=True)
def _rows() -> Iterator[None]:
    register_rows()
    yield
    del capability._REGISTRY["rows"]


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Workers(4, tmp_path_factory.mktemp("group")) as started:
        yield started
