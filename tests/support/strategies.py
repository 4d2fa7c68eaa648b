"""Hypothesis strategies for stored matrices."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from foldmoe.formats import Format

FP8_FORMATS = (Format.FP8_128x128, Format.FP8_32x32, Format.MXFP8)
QUANTIZED_FORMATS = (*FP8_FORMATS, Format.MXFP4, Format.NVFP4)


@st.composite
def weights(draw: st.DrawFn, *, even_columns: bool = False, stacks: bool = True) -> Tensor:
    """Float32 ``[..., N, K]``: any shape that leaves short last blocks, any magnitude, some rows and columns zero."""
    lead = draw(st.sampled_from([(), (1,), (3,)])) if stacks else ()
    rows = draw(st.integers(1, 140))
    columns = draw(st.integers(1, 150))
    columns += columns % 2 if even_columns else 0
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    weight = torch.randn(*lead, rows, columns, generator=generator) * 2.0 ** draw(st.integers(-30, 30))
    weight[..., draw(st.integers(0, rows - 1)), :] = 0.0
    if draw(st.booleans()):
        weight[..., : draw(st.integers(0, columns))] = 0.0
    return weight


def all_bytes() -> Tensor:
    """0 .. 255, uint8."""
    return torch.arange(256, dtype=torch.uint8)
