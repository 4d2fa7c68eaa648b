"""The symmetric strategy where it cannot run, and its kernels for GPUs that are not here."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from foldmoe.parallel import Scheme, simulate
from tests.parallel.offline import CDNA, HOPPER, TILES, compiled, placing
from tests.parallel.support import deal, make_case, virtual, weights_of

if TYPE_CHECKING:
    from tests.parallel.workers import Workers

FALLBACK = "rank 0: CPUs have no kernels that write to peers"


def test_without_gpus_it_is_an_all_gather_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    case = make_case(5, 4)
    with caplog.at_level(logging.WARNING):
        moe = virtual(weights_of(4), simulate(2), strategy="symmetric", dtype=torch.float32)
    assert moe.fallback == FALLBACK
    assert moe.stats()["fallback"] == FALLBACK
    assert f"layers.3.ffn: all-gather instead of symmetric memory: {FALLBACK}" in caplog.text
    plain = virtual(weights_of(4), simulate(2), strategy="all_gather", dtype=torch.float32)
    assert "fallback" not in plain.stats()
    for a, b in zip(*(one.forward_ranks(deal(case, [3, 2])) for one in (moe, plain)), strict=True):
        assert torch.equal(a, b)


def test_processes_over_gloo_fall_back_alike(workers: Workers) -> None:
    arguments: dict[str, Any] = {"fold": "native", "experts": 4, "counts": [4, 1], "backend": "rows"}
    asked = workers.run("forward", 2, strategy="symmetric", **arguments)
    plain = workers.run("forward", 2, strategy="all_gather", **arguments)
    for found, expected in zip(asked, plain, strict=True):
        assert found["stats"]["fallback"] == "rank 0: the group has no GPUs (gloo)"
        assert np.array_equal(found["y"], expected["y"])


def test_a_rank_without_memory_keeps_all_from_waiting_for_it(workers: Workers) -> None:
    assert workers.run("no_memory", 2, patience=30) == ["rank 1: torch's symmetric memory: MemoryError"] * 2


def test_its_buffers() -> None:
    scheme = Scheme((4, 4), 256, 3, False, True, "fp8", torch.bfloat16, torch.bfloat16, "symmetric", "rank", 8)
    found = scheme.buffers()
    assert found["mailbox"] == 2 * 2 * 8 * 512  # halves, ranks, tokens, the larger of a row and a result
    assert found["local x"] == 2 * 8 * 256 * 2
    assert "rows sent" not in found
    with pytest.raises(ValueError, match="order 'route' needs strategy 'all_to_all': 'symmetric' has one result"):
        Scheme((4, 4), 256, 3, False, True, "fp8", torch.bfloat16, torch.bfloat16, "symmetric", "route", 8)


LAYOUT: dict[str, Any] = {"HEADER": 1024, "K": 6, "KP": 8, "RANKS": 2}


def kernels(tile: str, clock: bool) -> dict[str, dict[str, Any]]:
    rows = LAYOUT | {"COLUMNS": 8192}
    return {
        "send_kernel": LAYOUT | TILES[tile] | {"PDL": clock},
        "receive_kernel": LAYOUT | TILES[tile] | placing() | {"CLOCK": clock, "PDL": clock},
        "return_kernel": rows | {"PDL": clock},
        "sum_kernel": rows | {"CLOCK": clock, "PDL": clock},
    }


@pytest.mark.parametrize("name", ["send_kernel", "receive_kernel", "return_kernel", "sum_kernel"])
@pytest.mark.parametrize("tile", TILES)
def test_kernels_compile_for_hopper_with_wide_writes_and_the_flags_order(name: str, tile: str) -> None:
    pytest.importorskip("triton")
    text = compiled("one_sided_kernels", name, kernels(tile, clock=True)[name], HOPPER)
    assert "griddepcontrol.launch_dependents" in text
    assert ("griddepcontrol.wait" in text) == (name in ("receive_kernel", "sum_kernel"))
    if name in ("send_kernel", "return_kernel"):
        assert "st.global.v4.b32" in text  # 16 bytes a store, as the link wants them
        assert re.search(r"atom\S*sys\S*acq_rel\S*add|atom\S*acq_rel\S*sys\S*add", text)
        assert re.search(r"atom\S*sys\S*release\S*exch|atom\S*release\S*sys\S*exch", text)
    else:
        assert re.search(r"(ld|atom)\S*(sys\S*acquire|acquire\S*sys)", text)
        assert "globaltimer" in text


@pytest.mark.parametrize("name", ["send_kernel", "receive_kernel", "return_kernel", "sum_kernel"])
def test_kernels_compile_for_cdna(name: str) -> None:
    pytest.importorskip("triton")
    assert compiled("one_sided_kernels", name, kernels("fp8", clock=False)[name], CDNA)
