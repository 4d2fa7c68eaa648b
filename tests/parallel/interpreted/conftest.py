"""As the Triton backend's interpreted tests: loop bounds work, and memory that nobody wrote is NaN."""

from tests.triton.interpreted.conftest import _poison  # noqa: F401
