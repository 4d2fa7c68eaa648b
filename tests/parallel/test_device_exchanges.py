"""The kernels between collectives, compiled for GPUs that are not here. ``interpreted/`` has their numbers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.offline import CDNA, HOPPER, TILES, compiled, placing

NAMES = ("pack_kernel", "positions_kernel", "scatter_kernel", "unpack_kernel", "reduce_kernel")


def constants(name: str, tile: str, pdl: bool) -> dict[str, Any]:
    routes, ranks = {"K": 6, "KP": 8}, {"RANKS": 2}
    return {
        "pack_kernel": routes | TILES[tile],
        "positions_kernel": routes | ranks | {"BLOCK": 512},
        "scatter_kernel": routes | ranks | TILES[tile],
        "unpack_kernel": routes | TILES[tile] | placing() | {"PDL": pdl},
        "reduce_kernel": ranks | {"COLUMNS": 8192, "SCATTERED": tile == "fp8"},
    }[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tile", TILES)
def test_kernels_compile_for_hopper(name: str, tile: str) -> None:
    pytest.importorskip("triton")
    text = compiled("row_kernels", name, constants(name, tile, pdl=True), HOPPER)
    if name != "positions_kernel":
        assert "st.global.v4.b32" in text  # 16 bytes a store
    assert ".local" not in text, "spilled"


@pytest.mark.parametrize("name", NAMES)
def test_kernels_compile_for_cdna(name: str) -> None:
    pytest.importorskip("triton")
    assert compiled("row_kernels", name, constants(name, "fp8", pdl=False), CDNA)
