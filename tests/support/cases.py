"""Layers, inputs and routings that every backend's tests share, so that no test forgets the awkward ones.

    routed, shared = make_layer(Format.MXFP4, Format.FP8_128x128, experts=8, width=192, shared_width=320, hidden=256)
    for case in cases(tokens=17, top_k=4, experts=8, hidden=256):
        y = layer(*case.args, **case.kwargs)
        assert_close(y, reference_moe(*case.args, routed, shared, **case.kwargs), BF16_TOLERANCE)

Everything is seeded: the same arguments give the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foldmoe.formats import Format, QuantizedTensor, fp8, mxfp4, nvfp4
from foldmoe.moe import ExpertWeights
from foldmoe.reference import relative_error

if TYPE_CHECKING:
    from collections.abc import Iterator

ODD_WIDTHS = (40, 64, 192, 288, 320, 576)
"""Intermediate widths that no 128-wide block or tile divides."""

TINY = 6e-38
"""An amax near the smallest normal float32: amax / 448 is subnormal there."""

FLOAT32_TOLERANCE = 1e-6
BF16_TOLERANCE = 4e-3
FP8_TOLERANCE = 6e-3
FOLDED_TOLERANCE = 6e-3
"""Folded against serial on one backend: bf16 rounding of the parts alone gives 3e-3 to 4e-3."""


def quantize(weight: Tensor, format: Format, *, e8m0_scales: bool | None = None) -> QuantizedTensor:
    """A float weight ``[..., N, K]`` in ``format``."""
    if format is Format.BF16:
        return QuantizedTensor(weight.to(torch.bfloat16), format=format)
    if format is Format.MXFP4:
        return mxfp4.quantize(weight)
    if format is Format.NVFP4:
        return nvfp4.quantize(weight)
    return fp8.quantize_block(weight, format, e8m0_scales=e8m0_scales)


def make_experts(
    format: Format,
    experts: int,
    width: int,
    hidden: int,
    *,
    seed: int = 0,
    e8m0_scales: bool | None = None,
    tiny_block: bool = False,
) -> ExpertWeights:
    """Random experts, N(0, 1/fan-in); the last row of each matrix of expert 0 is zero.

    Args:
        format: of all three matrices; ``width`` may cut its scale blocks.
        e8m0_scales: see :func:`foldmoe.formats.fp8.quantize_block`.
        tiny_block: the first 32 columns of expert 0's first row have an amax of ``TINY``; scales of such a row span
            more binades than an exact upcast to E4M3 can.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> QuantizedTensor:
        weight = torch.randn(experts, rows, columns, generator=generator) / columns**0.5
        weight[:1, -1] = 0.0
        if tiny_block:
            weight[:1, 0, :32] = TINY
        return quantize(weight, format, e8m0_scales=e8m0_scales)

    return ExpertWeights.from_parts(matrix(width, hidden), matrix(width, hidden), matrix(hidden, width))


def make_layer(
    routed: Format,
    shared: Format,
    experts: int,
    width: int,
    shared_width: int,
    hidden: int,
    *,
    seed: int = 0,
    e8m0_scales: bool | None = None,
    tiny_block: bool = False,
) -> tuple[ExpertWeights, ExpertWeights]:
    """Routed experts and one shared expert with formats and widths of their own."""
    options: dict[str, Any] = {"e8m0_scales": e8m0_scales, "tiny_block": tiny_block}
    return (
        make_experts(routed, experts, width, hidden, seed=2 * seed, **options),
        make_experts(shared, 1, shared_width, hidden, seed=2 * seed + 1, **options),
    )


@dataclass(frozen=True, eq=False)
class Case:
    """Arguments of one forward call; the same for a layer and for ``reference_moe``."""

    name: str
    x: Tensor
    topk_ids: Tensor
    topk_weights: Tensor
    shared_weights: Tensor | None = None
    num_valid_tokens: int | None = None
    routed_scale: float = 1.0
    shared_rows: tuple[int, int] | None = None

    @property
    def args(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.x, self.topk_ids, self.topk_weights

    @property
    def kwargs(self) -> dict[str, Any]:
        return {
            "shared_weights": self.shared_weights,
            "num_valid_tokens": self.num_valid_tokens,
            "routed_scale": self.routed_scale,
            "shared_rows": self.shared_rows,
        }

    def to(self, device: torch.device | str) -> Case:
        shared = None if self.shared_weights is None else self.shared_weights.to(device)
        x, ids, weights = (t.to(device) for t in self.args)
        return replace(self, x=x, topk_ids=ids, topk_weights=weights, shared_weights=shared)

    def __str__(self) -> str:
        return self.name


def random_case(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    id_dtype: torch.dtype = torch.int64,
    seed: int = 0,
) -> Case:
    """Distinct random ids, and weights that sum to 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype)
    ids = torch.rand(tokens, experts, generator=generator).argsort(dim=-1)[:, :top_k].to(id_dtype)
    weights = torch.rand(tokens, top_k, generator=generator).add(0.1)
    return Case("random", x, ids, weights / weights.sum(dim=-1, keepdim=True))


def cases(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    id_dtype: torch.dtype = torch.int64,
    seed: int = 0,
) -> Iterator[Case]:
    """Every kind of routing and input that a layer must survive; names are stable, for use as test ids.

    Padding rows hold NaN in x and in every weight. Absent routes (-1) carry NaN weights. Where half the experts are
    empty, those are the odd ones; ids repeat where the even ones are fewer than ``top_k``.
    """
    base = random_case(tokens, top_k, experts, hidden, dtype=dtype, id_dtype=id_dtype, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    ids, weights = base.topk_ids, base.topk_weights
    absent = torch.rand(ids.shape, generator=generator) < 0.4
    every_other = torch.arange(tokens) % 2 == 1
    valid = tokens - tokens // 3
    padding = torch.arange(tokens) >= valid
    gate = torch.rand(tokens, generator=generator)
    half = (experts + 1) // 2
    even = 2 * torch.rand(tokens, half, generator=generator).argsort(dim=-1)[:, torch.arange(top_k) % half].to(id_dtype)

    def unroute(mask: Tensor) -> dict[str, Tensor]:
        return {"topk_ids": ids.masked_fill(mask, -1), "topk_weights": weights.masked_fill(mask, torch.nan)}

    hole, neighbour = experts // 2, (experts // 2 + 1) % experts
    not_first = (torch.arange(top_k) > 0).expand(tokens, -1)
    last_only = torch.where(not_first, -1, experts - 1).to(id_dtype)

    yield base
    yield replace(base, name="expert_without_tokens", topk_ids=ids.masked_fill(ids == hole, neighbour))
    yield replace(base, name="half_experts_empty", topk_ids=even)
    yield replace(base, name="all_on_one_expert", **unroute(not_first) | {"topk_ids": last_only})
    yield replace(base, name="absent_ids", **unroute(absent))
    yield replace(base, name="rows_without_routes", **unroute(every_other[:, None].expand(-1, top_k)))
    yield replace(base, name="no_routes_at_all", **unroute(torch.ones_like(absent)))
    yield replace(base, name="duplicate_ids", topk_ids=ids[:, :1].repeat(1, top_k))
    yield replace(
        base,
        name="nan_padding",
        x=base.x.masked_fill(padding[:, None], torch.nan),
        topk_weights=weights.masked_fill(padding[:, None], torch.nan),
        shared_weights=gate.masked_fill(padding, torch.nan),
        num_valid_tokens=valid,
    )
    yield replace(base, name="zero_rows", x=base.x.masked_fill(every_other[:, None], 0.0))
    yield replace(base, name="tiny_amax", x=torch.where(every_other[:, None], base.x.sign() * TINY, base.x).to(dtype))
    yield replace(base, name="shared_gate", shared_weights=gate)
    yield replace(base, name="routed_scale", routed_scale=2.5)
    yield replace(base, name="shared_rows", shared_rows=(tokens // 4, tokens - tokens // 4))
    yield replace(base, name="no_tokens", x=base.x[:0], topk_ids=ids[:0], topk_weights=weights[:0])
    yield replace(base, name="top_0", topk_ids=ids[:, :0], topk_weights=weights[:, :0])


CASE_NAMES = tuple(case.name for case in cases(1, 1, 1, 1))


def get_case(name: str, tokens: int, top_k: int, experts: int, hidden: int, **options: Any) -> Case:
    """One of :func:`cases` by name."""
    return next(case for case in cases(tokens, top_k, experts, hidden, **options) if case.name == name)


def assert_close(y: Tensor, reference: Tensor, tolerance: float, one_row: float = 0.0) -> None:
    """y is finite, has the reference's shape, is exactly zero where a whole row of it is, and is within ``tolerance``.

    The tolerance bounds ||y - reference|| / ||reference||, in float64. One row may be further off, as long as all
    together stay within ``one_row``.
    """
    assert y.shape == reference.shape
    error = relative_error(y, reference)
    if tolerance < error <= one_row and len(y) > 1:
        others = torch.arange(len(y), device=y.device) != (y.double() - reference).norm(dim=-1).argmax()
        error = float((y.double() - reference)[others].norm() / reference.norm())
    assert error <= tolerance, f"relative error {error:.3e}, allowed {tolerance:.1e}"
    silent = (reference == 0).all(dim=-1)
    assert (y[silent] == 0).all(), f"rows {silent.nonzero().flatten().tolist()} must be exactly zero"


def assert_same_bits(y: Tensor, wanted: Tensor, what: str = "") -> None:
    """Equal rows ``[M, H]``, or which differ and by how much: a tile, a token or all of them tell causes apart."""
    assert y.shape == wanted.shape, f"{what}: {tuple(y.shape)} against {tuple(wanted.shape)}"
    differ = ~((y == wanted) | (y.isnan() & wanted.isnan()))
    if not differ.any():
        return
    rows, columns = differ.any(1).nonzero().flatten(), differ.any(0).nonzero().flatten()
    most = (y.double() - wanted.double()).nan_to_num().abs().max().item()
    raise AssertionError(
        f"{what}: {int(differ.sum()):,} values differ by up to {most:.2g}, in {len(rows)} of {len(y)} rows "
        f"({rows[:12].tolist()} ..), columns {int(columns[0])} to {int(columns[-1])}; "
        f"{int((y.isnan() != wanted.isnan()).sum()):,} are NaN on one side"
    )
