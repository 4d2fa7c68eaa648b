from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foldmoe.formats import blocks

SIDES = st.integers(1, 70)
POWERS = st.sampled_from([1, 2, 4, 8, 16, 32])


@given(SIDES, SIDES, POWERS, POWERS)
def test_expand_gives_every_element_the_scale_of_its_block(rows: int, columns: int, bn: int, bk: int) -> None:
    n, k = blocks.scale_shape(rows, columns, (bn, bk))
    scales = torch.arange(2 * n * k).view(2, n, k)
    wide = blocks.expand(scales, rows, columns, (bn, bk))
    row, column = torch.arange(rows)[:, None] // bn, torch.arange(columns)[None] // bk
    assert torch.equal(wide, scales[:, row, column])


@given(SIDES, SIDES, POWERS, POWERS, st.integers(0, 5), st.integers(0, 5))
def test_regrid_changes_no_elements_scale(rows: int, columns: int, bn: int, bk: int, down_n: int, down_k: int) -> None:
    old, new = (bn, bk), (max(bn >> down_n, 1), max(bk >> down_k, 1))
    scales = torch.randn(3, *blocks.scale_shape(rows, columns, old))
    fine = blocks.regrid(scales, rows, columns, old, new)
    assert fine.shape[-2:] == blocks.scale_shape(rows, columns, new)
    assert torch.equal(blocks.expand(fine, rows, columns, new), blocks.expand(scales, rows, columns, old))


def test_regrid_refuses_a_block_that_would_straddle_two_scales() -> None:
    with pytest.raises(ValueError, match=r"\(96, 128\) does not divide block \(128, 128\)"):
        blocks.regrid(torch.ones(2, 2), 256, 256, (128, 128), (96, 128))


@given(st.integers(0, 3), st.integers(1, 70), st.integers(1, 40))
def test_groups_fill_the_last_one_with_zeros(rows: int, columns: int, size: int) -> None:
    matrix = torch.randn(rows, columns)
    grouped = blocks.groups(matrix, size)
    assert grouped.shape == (rows, -(-columns // size), size)
    assert torch.equal(grouped.flatten(1)[:, :columns], matrix)
    assert (grouped.flatten(1)[:, columns:] == 0).all()
