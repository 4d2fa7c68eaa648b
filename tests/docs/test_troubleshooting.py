"""The troubleshooting page lists every reason in the code and none that is gone; plans give no other reasons."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

import foldmoe.backends  # noqa: F401  registers the backends that plans ask
from foldmoe import Activation, Format, FusionPolicy, Placement, plan_layer
from foldmoe.moe import ExpertSpec, LayerSpec
from foldmoe.planner import capability
from tests.docs import reasons

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


@pytest.fixture(scope="module")
def listed() -> set[str]:
    """The page's lines, as written."""
    rows = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert len(rows) > 50
    return set(rows)


def test_every_function_that_words_reasons_is_known() -> None:
    assert reasons.unlisted() == [], "add it to SOURCES (or NO_REASONS) in tests/docs/reasons.py"


@pytest.mark.parametrize("file", reasons.SOURCES)
def test_page_lists_every_reason(file: str, listed: set[str]) -> None:
    missing = reasons.everything()[file] - listed
    assert not missing, "docs/troubleshooting.md lacks:\n" + "\n".join(f"| `{line}` |" for line in sorted(missing))


def test_page_lists_nothing_that_is_gone(listed: set[str]) -> None:
    gone = listed - set().union(*reasons.everything().values())
    assert not gone, "no code says any more:\n" + "\n".join(sorted(gone))


def _layers() -> list[LayerSpec]:
    """Layers that between them meet every refusal of planner and backends that a header can cause."""
    plain = LayerSpec("layers.0.mlp", 256, 2, ExpertSpec(8, 64, Format.MXFP4), ExpertSpec(1, 64, Format.FP8_32x32))
    routed, shared = plain.routed, plain.shared
    assert shared is not None
    changes = [
        {},
        {"hidden": 40},
        {"shared": None},
        {"shared": replace(shared, width=96)},
        {"shared": replace(shared, count=2)},
        {"shared": replace(shared, width=40)},
        {"shared": replace(shared, format=Format.NVFP4, block=(0, 0))},
        {"shared": replace(shared, block=(4, 16))},
        {"shared": replace(shared, e8m0_scales=True)},
        {"shared_activation": Activation(7.0)},
        {"routed": replace(routed, count=0), "top_k": 0},
        {"routed": replace(routed, count=4096)},
        {"routed": replace(routed, width=40)},
        {"routed": replace(routed, format=Format.BF16, float_bytes=4)},
        {"routed": replace(routed, format=Format.FP8_32x32, block=(0, 0))},
        {"routed": replace(routed, width=2**20), "hidden": 2**14},
    ]
    return [replace(plain, **change) for change in changes]


def test_plans_give_no_reason_that_the_page_lacks(listed: set[str]) -> None:
    wording = [re.compile(re.escape(line).replace("…", "(?s:.+)")) for line in listed]
    backends = "|".join(backend.name for backend in capability.registered())
    found: set[str] = set()
    policies = [
        FusionPolicy(fold, activations=activations, backend=backend)  # type: ignore[arg-type]
        for fold, activations, backend in product(
            ("auto", "slot", "dual", "off", "stock"), ("checkpoint", "fp8", "fp8_token"), ("auto", "hopper", "triton")
        )
    ]
    for spec, policy, device, tp in product(_layers(), policies, ("cpu", "h200", "a100", "mi355x"), (1, 3)):
        found |= {*plan_layer(spec, policy, device, Placement(tp_size=tp)).reasons}
    assert len(found) > 40
    for reason in found:
        bare = re.sub(rf"^({backends}|slot): ", "", reason)
        assert any(pattern.fullmatch(bare) for pattern in wording), f"not on the page: {reason}"
