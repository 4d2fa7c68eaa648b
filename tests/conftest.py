"""What every test gets: a fixed seed, a bounded hypothesis profile, and a loud skip where a GPU is missing."""

from __future__ import annotations

import signal

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("tests.support.cases")

settings.register_profile(
    "foldmoe", deadline=None, max_examples=40, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("foldmoe")

# Shells start background jobs with SIGINT ignored, and what tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# `timeout` ends a run with SIGTERM, which would leave the servers that tests started behind.
signal.signal(signal.SIGTERM, signal.default_int_handler)

torch.set_num_threads(1)  # the layers here are small; more threads only contend with other processes


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device, and torch finds none"))
