# mypy: ignore-errors
"""A call's routes over all ranks as one rank's own, the shared expert's slot appended: one launch.

One element of the output a lane, so that any K works, a power of two or not.
"""

import triton
import triton.language as tl

BLOCK = 256
"""Elements of the output a program."""


@triton.jit(
    do_not_specialize=[
        "total",
        "ids_stride",
        "weights_stride",
        "first",
        "held",
        "count",
        "valid",
        "start",
        "end",
        "scale",
    ],
)
def rank_routes(
    ids, weights, gate, rows, valid_rows, strays, out_ids, out_weights,
    total, ids_stride, weights_stride, first, held, count, valid, start, end, scale,
    K: tl.constexpr, SLOT: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr, VALID: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: ceil(total / BLOCK), total = M * (K + SLOT).

    ids ``[M, K]`` int32 or int64 over all ranks. out_ids ``[M, K + SLOT]``: 0 .. held - 1 for first .. first + held
    - 1, -1 for all others; strays counts those outside -1 .. count - 1 in rows before valid (where VALID: the number in
    ``valid_rows``). Where SLOT, rows start .. end - 1 (where ROWS: the two numbers in ``rows``) get a route to
    the slot, ``held``, of weight gate ``[M]`` (where GATED) or 1, and out_weights ``[M, K + 1]`` are the weights
    ``[M, K]`` times scale, then that one. Weights are float32.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row = i // (K + SLOT)
    k = i - row * (K + SLOT)
    live = i < total
    routed = live & (k < K)
    raw = tl.load(ids + row * ids_stride + k, mask=routed, other=-1)
    if VALID:
        valid = tl.load(valid_rows)
    wrong = tl.sum((((raw < -1) | (raw >= count)) & (row < valid)).to(tl.int32), 0)
    if wrong > 0:
        tl.atomic_add(strays, wrong.to(tl.int64), sem="relaxed")
    expert = raw - first
    out = tl.where((expert >= 0) & (expert < held) & routed, expert, -1)
    if SLOT:
        if ROWS:
            start = tl.load(rows)
            end = tl.load(rows + 1)
        out = tl.where((k == K) & (row >= start) & (row < end), held, out)
        weight = tl.load(weights + row * weights_stride + k, mask=routed, other=1.0)
        weight = tl.where(k < K, weight * scale, 1.0)
        if GATED:
            weight = tl.where(k < K, weight, tl.load(gate + row, mask=live, other=0.0))
        tl.store(out_weights + i, weight, mask=live)
    tl.store(out_ids + i, out, mask=live)
