"""Kernels compile for every GPU we name, without one: no trap, no spill in a loop, shared memory that it has; and
products that overlap on sm_90.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.importorskip("triton")

from foldmoe.backends.triton import rank_routes
from tests.triton import aot
from tests.triton.aot_layers import BF16_LAYER, DECODE, MAIN_LAYER, PREFILL, call_of, layer_of
from tests.triton.rank_cases import COUNT, OWN, calls
from tests.triton.support import BF16, FP8, FP8_32, MXFP4, MXFP8

if TYPE_CHECKING:
    from pathlib import Path

    from foldmoe.backends.triton.layer import TritonLayer


def check(layer: TritonLayer, tokens: int, target: str, folder: Path) -> None:
    machine = aot.TARGETS[target][1]
    for found in aot.record(layer, call_of(tokens), machine):
        kernel = aot.compile_for(found, target)
        where = f"{found.name} {found.constants} {found.options}"
        assert kernel.metadata.shared <= machine.shared_memory, where
        if "ptx" in kernel.asm:
            assert "\ttrap;" not in kernel.asm["ptx"], where
            usage = aot.spills(kernel, folder)
            print(target, tokens, found.name, found.options, usage)
            if target == "sm_90":
                assert usage["local_in_loops"] == 0, (where, usage)
                assert usage["stack"] <= 32, (where, usage)
                assert not aot.performance_warnings(kernel, folder), where
        else:
            assert "s_trap" not in kernel.asm["amdgcn"], where


@pytest.mark.parametrize(("target", "tokens"), [*((target, DECODE) for target in aot.TARGETS), ("sm_90", PREFILL)])
def test_main_layer(target: str, tokens: int, tmp_path: Path) -> None:
    check(layer_of(*MAIN_LAYER), tokens, target, tmp_path)


@pytest.mark.parametrize("target", aot.TARGETS)
def test_routes_of_one_rank(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[aot.Launch] = []

    def record(kernel: Any, _grid: Any, tensors: Any, numbers: Any, **constants: Any) -> None:
        found.append(aot.launch_of(kernel, tensors, numbers, constants))

    monkeypatch.setattr(rank_routes, "launch", record)
    for call, slot in calls("cpu"):
        rank_routes.rank_routes(call, OWN, COUNT, slot, torch.zeros(1, dtype=torch.int64))
    kinds = {one.key: one for one in found}
    assert len(kinds) > 20
    for one in list(kinds.values())[:: max(1, len(kinds) // 6)]:
        aot.compile_for(one, target)


OTHERS = {
    "mxfp4-fp8_32": (MXFP4, FP8_32, "fp8"),
    "mxfp4-mxfp4": (MXFP4, MXFP4, "bf16"),
    "fp8-fp8": (FP8, FP8, "fp8"),
    "bf16-bf16": BF16_LAYER,
    "mxfp8-bf16": (MXFP8, BF16, "fp8"),
    "mxfp4-fp8 one scale a token": (MXFP4, FP8, "fp8_token"),
}


@pytest.mark.slow
@pytest.mark.parametrize("target", aot.TARGETS)
@pytest.mark.parametrize("tokens", [DECODE, PREFILL])
@pytest.mark.parametrize("name", OTHERS)
def test_other_layers(name: str, tokens: int, target: str, tmp_path: Path) -> None:
    check(layer_of(*OTHERS[name]), tokens, target, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", aot.TARGETS)
def test_width_that_no_step_divides(target: str, tmp_path: Path) -> None:
    check(layer_of(MXFP4, MXFP8, "fp8", width=288), PREFILL, target, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", [target for target in aot.TARGETS if target != "sm_90"])
def test_main_layer_prefill(target: str, tmp_path: Path) -> None:
    check(layer_of(*MAIN_LAYER), PREFILL, target, tmp_path)


def test_shared_tiles_cost_a_folded_grid_no_registers(tmp_path: Path) -> None:
    """The shared tile of this batch alone is four times as wide, and one program would fit an SM in place of two."""
    layer, call, machine = layer_of(*MAIN_LAYER), call_of(128), aot.TARGETS["sm_90"][1]
    folded, routed, shared = (
        aot.spills(aot.compile_for(found, "sm_90"), tmp_path)["registers"]
        for together in (True, False)
        for found in aot.record(layer, call, machine, folded=together)
        if found.name == "up"
    )
    assert folded <= routed < 65536 // (2 * 256) < shared


def test_hopper_multiplies_out_of_registers() -> None:
    """Upcast weights are a register operand of ``wgmma``: words are loaded in its layout and never stored back."""
    for found in aot.record(layer_of(*MAIN_LAYER), call_of(DECODE), aot.TARGETS["sm_90"][1]):
        if found.name in ("up", "down"):
            lines = aot.compile_for(found, "sm_90").asm["ttgir"].splitlines()
            dots = [line for line in lines if "ttng.warp_group_dot " in line]
            assert dots
            assert all("dot_op<{opIdx = 0" in line.split("*")[0] for line in dots)
