"""The symmetric strategy where it cannot run, and its kernels for GPUs that are not here."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from foldmoe.parallel import Scheme, simulate
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


def test_its_buffers() -> None:
    scheme = Scheme((4, 4), 256, 3, False, True, "fp8", torch.bfloat16, torch.bfloat16, "symmetric", "rank", 8)
    found = scheme.buffers()
    assert found["mailbox"] == 2 * 2 * 8 * 512  # halves, ranks, tokens, the larger of a row and a result
    assert found["local x"] == 2 * 8 * 256 * 2
    assert "rows sent" not in found
    with pytest.raises(ValueError, match="order 'route' needs strategy 'all_to_all': 'symmetric' has one result"):
        Scheme((4, 4), 256, 3, False, True, "fp8", torch.bfloat16, torch.bfloat16, "symmetric", "route", 8)


LAYOUT: dict[str, Any] = {"HEADER": 1024, "K": 6, "KP": 8, "RANKS": 2}
TILES: dict[str, dict[str, Any]] = {
    "fp8": {"GROUP": 128, "GROUPS": 64, "COLUMNS": 128},
    "bf16": {"GROUP": 0, "GROUPS": 1, "COLUMNS": 8192},
}
POINTERS = {
    **dict.fromkeys(("peers", "ends", "state", "alarm", "strays"), "*i64"),
    **dict.fromkeys(("weights", "gates", "gate"), "*fp32"),
    **dict.fromkeys(("x", "y", "results"), "*bf16"),
    "ids": "*i32",
}


def compiled(name: str, constants: dict[str, Any], target: tuple[str, int | str, int]) -> str:
    """Assembly, as the launcher's sizes would have it: strides and sizes are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from foldmoe.parallel import one_sided_kernels

    kernel = getattr(one_sided_kernels, name)
    names = [parameter.name for parameter in kernel.params]
    signature = {one: "constexpr" if one in constants else POINTERS.get(one, "i32") for one in names}
    signature |= {one: "i64" for one in ("limit",) if one in names}
    aligned = [one for one in names if one in (*POINTERS, "x_stride", "hidden", "half", "row_bytes")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(one),): value for one, value in constants.items()},
        attrs={(names.index(one),): [["tt.divisibility", 16]] for one in aligned},
    )
    built = triton.compile(source, target=GPUTarget(*target), options={"num_warps": 8})
    return str(built.asm["ptx" if target[0] == "cuda" else "amdgcn"])


def kernels(tile: str, clock: bool) -> dict[str, dict[str, Any]]:
    import triton.language as tl

    flags = {"WIRE": tl.bfloat16, "SLOT": 1, "GATED": True, "CLOCK": clock}
    rows = LAYOUT | {"COLUMNS": 8192}
    return {
        "send_kernel": LAYOUT | TILES[tile],
        "receive_kernel": LAYOUT | TILES[tile] | flags,
        "return_kernel": rows,
        "sum_kernel": rows | {"CLOCK": clock},
    }


@pytest.mark.parametrize("name", ["send_kernel", "receive_kernel", "return_kernel", "sum_kernel"])
@pytest.mark.parametrize("tile", TILES)
def test_kernels_compile_for_hopper_with_wide_writes_and_the_flags_order(name: str, tile: str) -> None:
    pytest.importorskip("triton")
    text = compiled(name, kernels(tile, clock=True)[name], ("cuda", 90, 32))
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
    assert compiled(name, kernels("fp8", clock=False)[name], ("hip", "gfx942", 64))
