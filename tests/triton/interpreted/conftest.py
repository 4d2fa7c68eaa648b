"""Everything here runs under ``TRITON_INTERPRET=1``, with memory that nobody wrote filled with NaN."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from tests.triton.interpreted import patch

if TYPE_CHECKING:
    from collections.abc import Iterator

patch.apply()


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """``torch.empty`` gives NaN (bytes of 255), in outputs and workspace alike."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
