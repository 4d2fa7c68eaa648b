"""Stored weights to the kernel's layout and back, bit for bit.

Rows are grouped in blocks of 256, columns in steps of 128. A *unit* is 64 rows of one block x one step; a block's steps
follow each other, four units a step. An up projection's block takes 128 gate rows and their 128 up rows, interleaved by
8, so that a thread of ``wgmma`` holds a gate value and its up value; short blocks and steps end in zeros.

MXFP4 unit: 4096 bytes of codes, in which a thread's 16-byte load is its ``wgmma`` operand, and 256 exponent offsets
relative to the row's reference. FP8 unit: 64 rows of 128 bytes, and one scale per 8 rows and column group.

An MXFP4 product's columns are permuted within a step (:func:`column_order`), tokens and hidden vectors alike, so that
all of a thread's codes of one row have one scale: a table a row, not one for every 32 columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from foldmoe.backends.base import Unsupported

MAX_SPAN = 11
"""Binades that one row's exponents may span: E4M3 normals from 0.5 x 2**-5 to 6 x 2**6 around the reference."""

LOWEST, HIGHEST = 27, 227
"""Largest scale byte of a row that has a nonzero code: its products stay normal float32 numbers."""

_PARTS = 100
"""Experts are packed in that many parts, or one by one: few operations, while the copies alive at once, of five parts,
stay under 5 % of a layer of 200 experts or more. With fewer experts they are those of five experts.
"""


def row_blocks(rows: int) -> int:
    """256-row blocks of a matrix; an interleaved one (gate and up) is cut at 128 features."""
    return -(-rows // 256)


def padded(columns: int) -> int:
    """Columns rounded up to whole steps of 128."""
    return -(-columns // 128) * 128


def row_order(rows: int, interleaved: bool, device: torch.device | str = "cpu", *, permuted: bool = False) -> Tensor:
    """Source row of every packed row; ``rows`` where there is none (zeros).

    ``permuted``: the features of an interleaved block come in :func:`column_order`, so that a unit's lie side by side
    in a hidden vector that is stored in that order: 32 bytes a token, a whole sector of memory.
    """
    blocks = row_blocks(rows)
    packed = torch.arange(blocks * 256, device=device)
    if not interleaved:
        return packed.clamp(max=rows)
    width = rows // 2
    group, lane = packed // 8, packed % 8
    feature = group // 2 * 8 + lane
    if permuted:
        feature = feature // 128 * 128 + column_order().to(device)[feature % 128]
    return torch.where(feature < width, feature + group % 2 * width, torch.full_like(packed, rows))


def column_order() -> Tensor:
    """Stored column at each of the 128 positions of an MXFP4 step.

    An operand's lane t holds positions ``j * 32 + s * 16 + t * 4 + i`` (j < 4, s < 2, i < 4): stored columns
    ``t * 32 + j * 8 + s * 4 + i``, all of one group of 32.
    """
    position = torch.arange(128)
    j, s, t, i = position // 32, position // 16 % 2, position // 4 % 4, position % 4
    return t * 32 + j * 8 + s * 4 + i


class Packed:
    """Sizes of experts in kernel layout; ``shape`` is the stored (experts, rows, columns)."""

    shape: tuple[int, int, int]

    @property
    def blocks(self) -> int:
        """256-row blocks an expert."""
        return row_blocks(self.shape[1])

    @property
    def steps(self) -> int:
        """128-column steps."""
        return padded(self.shape[2]) // 128


@dataclass
class PackedRouted(Packed):
    """MXFP4 experts in kernel layout.

    Args:
        codes: ``[units * 16, 256]`` uint8.
        offsets: ``[units, 256]`` uint8, scale byte - reference byte + 5 of every row and 32 columns.
        references: ``[experts * packed rows]`` float32, 2 ** (row's largest used scale byte - 133).
        stray_index, stray_byte: scale bytes of all-zero groups that no offset expresses, by flat index.
        shape: stored (experts, rows, columns). interleaved: gate and up rows.
    """

    codes: Tensor
    offsets: Tensor
    references: Tensor
    stray_index: Tensor
    stray_byte: Tensor
    shape: tuple[int, int, int]
    interleaved: bool

    @property
    def nbytes(self) -> int:
        tensors = (self.codes, self.offsets, self.references, self.stray_index, self.stray_byte)
        return sum(t.nbytes for t in tensors)

    @property
    def factors(self) -> Tensor:
        """What sums are multiplied by, for the kernel."""
        return self.references


def pack_mxfp4(
    codes: Tensor,
    scales: Tensor,
    gate_up_interleave: bool,
    *,
    consume: bool = False,
    checked: bool = False,
    name: str = "weights",
) -> PackedRouted:
    """Pack ``codes [E, N, K/2]`` and ``scales [E, N, K/32]`` (uint8), a few experts at a time.

    Args:
        consume: write the result over the given tensors where sizes allow; the caller gives them up.
        checked: :func:`check_mxfp4` has passed already.

    Raises:
        ValueError, Unsupported: see :func:`check_mxfp4`.
    """
    if not checked:
        check_mxfp4(codes, scales, name=name)
    experts, rows, half = codes.shape
    columns = half * 2
    blocks, steps = row_blocks(rows), padded(columns) // 128
    device = codes.device
    order = row_order(rows, gate_up_interleave, device, permuted=True)
    exact = blocks * 256 == rows and steps * 128 == columns
    reuse = consume and exact and in_place(codes) and in_place(scales)
    size = blocks * steps * 4
    out = codes.view(experts, -1) if reuse else torch.empty(experts, size * 4096, dtype=torch.uint8, device=device)
    out_offsets = (
        scales.view(experts, -1) if reuse else torch.empty(experts, size * 256, dtype=torch.uint8, device=device)
    )
    references = torch.empty(experts, blocks * 256, dtype=torch.float32, device=device)
    stray_index: list[Tensor] = []
    stray_byte: list[Tensor] = []
    for part in _chunks(experts):
        offset, reference, stray = _offsets(codes[part], scales[part])
        if stray.any():
            where = stray.flatten().nonzero().flatten()
            stray_index.append(where + part.start * scales[0].numel())
            stray_byte.append(scales[part].flatten()[where])
        references[part] = torch.exp2(pad(reference, (0, 1), value=0).index_select(1, order).to(torch.float32))
        wide = pad(offset, (0, steps * 4 - offset.shape[2])) if steps * 4 != offset.shape[2] else offset
        out_offsets[part] = _pack_offsets(pick_rows(wide, order, rows).flatten(0, 1)).view(-1, size * 256)
        wide = pad(codes[part], (0, steps * 64 - half)) if steps * 64 != half else codes[part]
        out[part] = _pack_codes(pick_rows(wide, order, rows).flatten(0, 1)).view(-1, size * 4096)
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return PackedRouted(
        out.view(-1, 256),
        out_offsets.view(-1, 256),
        references.view(-1),
        torch.cat(stray_index) if stray_index else empty,
        torch.cat(stray_byte) if stray_byte else empty.to(torch.uint8),
        (experts, rows, columns),
        gate_up_interleave,
    )


def unpack_mxfp4(packed: PackedRouted) -> tuple[Tensor, Tensor]:
    """Inverse of :func:`pack_mxfp4`: ``codes [E, N, K/2]`` and ``scales [E, N, K/32]``, new tensors."""
    experts, rows, columns = packed.shape
    blocks, steps = packed.blocks, packed.steps
    device = packed.codes.device
    order = row_order(rows, packed.interleaved, device, permuted=True)
    codes = torch.empty(experts, rows, columns // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, rows, columns // 32, dtype=torch.uint8, device=device)
    keep = order < rows
    into = order[keep]
    units = packed.codes.view(experts, blocks, steps, 4, 4096)
    offsets = packed.offsets.view(experts, blocks, steps, 4, 256)
    references = packed.references.view(experts, -1)
    for e in range(experts):
        codes[e, into] = _unpack_codes(units[e])[:, : columns // 2][keep]
        relative = _unpack_offsets(offsets[e])[keep][:, : columns // 32].to(torch.int32)
        reference = torch.frexp(references[e][keep]).exponent - 1 + 127
        scales[e, into] = (relative + reference[:, None] - 5).to(torch.uint8)
    if packed.stray_index.numel():
        scales.view(-1)[packed.stray_index] = packed.stray_byte
    return codes, scales


def check_mxfp4(codes: Tensor, scales: Tensor, *, name: str = "weights") -> None:
    """Whether one reference exponent a row expresses every scale exactly.

    Raises:
        ValueError: a NaN scale.
        Unsupported: a row whose exponents span too far, or lie where float32 products would underflow; with the count.
    """
    for part in _chunks(codes.shape[0]):
        used, top, live = _tops(codes[part], scales[part])
        byte = scales[part].to(torch.int32)
        low = torch.where(used, byte, torch.full_like(byte, 1000)).amin(-1)
        span = torch.where(live, top - low, torch.zeros_like(top))
        odd = live & ((top < LOWEST) | (top > HIGHEST))
        nan = (used & (byte == 255)).sum((1, 2))
        facts = torch.stack((nan, (span > MAX_SPAN).sum(1), span.amax(1), odd.sum(1)), 1)
        for e, (nans, far, widest, outside) in enumerate(facts.tolist(), part.start):  # one wait for the device
            rows, where = codes.shape[1], f"{name}, expert {e}"
            if nans:
                raise ValueError(f"{where}: {nans} scale bytes are 255, which is NaN")
            if far:
                raise Unsupported(
                    f"{where}: the exponents of {far} of {rows} rows span more than {MAX_SPAN} binades (up to "
                    f"{widest}), which one reference exponent a row cannot express exactly in E4M3"
                )
            if outside:
                raise Unsupported(
                    f"{where}: the largest scale byte of {outside} of {rows} rows lies outside {LOWEST} .. {HIGHEST}"
                )


def _chunks(experts: int) -> list[slice]:
    """Experts that are packed together."""
    each = max(1, experts // _PARTS)
    return [slice(first, min(first + each, experts)) for first in range(0, experts, each)]


def _tops(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Groups with a nonzero code, the largest scale byte of a row's used groups, rows that have one."""
    used = ((codes.reshape(*scales.shape, 16) & 0x77) != 0).any(-1)
    byte = scales.to(torch.int32)
    top = torch.where(used, byte, torch.full_like(byte, -1)).amax(-1)
    return used, top, top >= 0


def _offsets(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per group offsets (0 .. 11), reference exponent per row, and which groups are stray."""
    _, top, live = _tops(codes, scales)
    top = torch.where(live, top, torch.full_like(top, 127))
    offset = scales.to(torch.int32) - top.unsqueeze(-1) + 11
    stray = (offset < 0) | (offset > 11)
    return torch.where(stray, torch.zeros_like(offset), offset).to(torch.uint8), top - 133, stray


def in_place(stored: Tensor) -> bool:
    """Whether a packed matrix can lie where ``stored`` does: TMA reads from multiples of 16 bytes only."""
    return stored.is_contiguous() and stored.data_ptr() % 16 == 0


def pick_rows(matrix: Tensor, order: Tensor, rows: int) -> Tensor:
    """Rows ``[.., N, K]`` by source index; ``rows``, which only blocks that they do not fill hold, gives zeros."""
    if rows % 256 == 0:
        return matrix.index_select(-2, order)
    return matrix.index_select(-2, order.clamp(max=rows - 1)).masked_fill_((order >= rows)[:, None], 0)


def _pack_codes(rows: Tensor) -> Tensor:
    """``[blocks * 256, K/2]`` bytes to units: words of 8 codes, magnitudes in table order, signs where they are used.

    A word is eight stored columns: nibble n selects output byte n; bit 7 of byte i is the sign of column i of the first
    four, bit 3 of the second.
    """
    blocks, steps = rows.shape[0] // 256, rows.shape[1] // 64
    words = rows.contiguous().view(torch.int32).view(blocks, 4, 4, 2, 8, steps, 4, 2, 2)  # b wg w h g kb t v s
    words = words.permute(0, 5, 1, 7, 2, 4, 6, 8, 3).contiguous()  # b kb wg v w g t s h
    return _sign_words(words, _SIGNS).view(torch.uint8).view(blocks, steps, 4, 4096)


def _unpack_codes(units: Tensor) -> Tensor:
    blocks, steps = units.shape[:2]
    words = _sign_words(units.contiguous().view(torch.int32).view(blocks, steps, 4, 2, 4, 8, 4, 2, 2), _SIGNS_BACK)
    rows = words.permute(0, 2, 4, 8, 5, 1, 6, 3, 7).contiguous()  # b wg w h g kb t v s
    return rows.view(torch.uint8).view(blocks * 256, steps * 64)


_SIGNS = ((19, 3), (3, 7), (23, 11), (7, 15), (27, 19), (11, 23), (31, 27), (15, 31))
"""(bit in the stored word, bit in the packed word) of the eight signs."""
_SIGNS_BACK = tuple((there, here) for here, there in _SIGNS)


def _sign_words(words: Tensor, moves: tuple[tuple[int, int], ...]) -> Tensor:
    out = words & 0x77777777
    for source, target in moves:
        moved = words << (target - source) if target >= source else words >> (source - target)
        moved &= 1 << target if target < 31 else -(1 << 31)
        out |= moved
    return out


def _pack_offsets(rows: Tensor) -> Tensor:
    blocks, steps = rows.shape[0] // 256, rows.shape[1] // 4
    return rows.view(blocks, 4, 4, 2, 8, steps, 4).permute(0, 5, 1, 2, 4, 6, 3).contiguous()  # b kb wg w g t h


def _unpack_offsets(units: Tensor) -> Tensor:
    blocks, steps = units.shape[:2]
    rows = units.reshape(blocks, steps, 4, 4, 8, 4, 2).permute(0, 2, 3, 6, 4, 1, 5).contiguous()
    return rows.view(blocks * 256, steps * 4)
