"""Runs under TRITON_INTERPRET=1 in its own process (see test_prologue.py): prologue and combine against plain torch."""

import itertools
import sys

import torch
import triton.language as tl
from triton.runtime import interpreter

from foldmoe.backends.base import Call
from foldmoe.backends.hopper import heuristics, launch, pack, workspace
from foldmoe.backends.hopper.batch import BOTH, Weights
from tests.hopper import oracle

_patch = interpreter._patch_lang_tensor


def _patch_with_index(tensor, scope):
    """The interpreter's scalars are arrays of one element, which numpy 2.4 no longer turns into an int."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


_convert = interpreter._convert_float


def _convert_with_carry(data, source, target, rounding):
    """The interpreter loses the carry where rounding to FP8 reaches the next power of two, and cuts bf16 off."""
    if source == tl.float32 and target == tl.bfloat16:
        return torch.from_numpy(data.copy()).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
    if source == tl.float32 and target == tl.float8e4nv:
        wide = torch.from_numpy(data.copy()).clamp(-448, 448)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return _convert(data, source, target, rounding)


interpreter._patch_lang_tensor = _patch_with_index
interpreter._convert_float = _convert_with_carry


def check(
    m, k, experts, hidden, shared, valid, shared_rows, ids_dtype, x_dtype, seed, tensors, tile, whole, routed, most
):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, hidden, generator=g).to(x_dtype)
    x[0, :128] = 0
    ids = torch.randint(-1, experts + 1, (m, k), generator=g).to(ids_dtype)  # -1 and E are no routes
    if k > 1:
        ids[m // 2] = ids[m // 2, 0]  # duplicates
    if k and ids_dtype == torch.int64:
        ids[0, -1] = 2**32 + 1  # expert 1 for whoever drops the upper half
    x[valid:] = float("nan")
    weights = torch.rand(m, k, generator=g)
    weights[ids < 0] = float("nan")
    geometry = heuristics.Geometry(hidden, 1, 1, 1, 1, 2, 2, 1, float("inf"), float("inf"), whole, routed)
    parts = heuristics.PARTS if seed % 2 else 1
    config = heuristics.build(geometry, tile, 8, 4, parts=parts)
    bound = torch.tensor([valid], dtype=torch.int32) if tensors else valid
    rows = torch.tensor(shared_rows, dtype=torch.int32) if tensors else shared_rows
    call = Call(x, ids, weights, torch.rand(m, generator=g) if shared else None, 1.5, bound, rows, most)
    nothing = torch.empty(0)
    up = pack.PackedRouted(nothing, nothing, nothing, nothing, nothing, (experts, 256, hidden), True)
    layer = Weights(up, up, object() if shared else None, None, geometry, torch.zeros(1, dtype=torch.int64))
    step = launch.Step(layer, call, config, BOTH, False)
    b = step.buffers
    for t in (b.xs, b.d):
        t.fill_(float("nan"))
    b.control.fill_(-77)
    step.prologue()
    want = oracle.sort_routes(x, ids, experts, shared, valid, shared_rows, tile, whole)
    head = b.control[:8].tolist()
    begin, end = want.shared
    begin = begin // 4 * 4 if end > begin else end
    assert head == [len(want.tiles), -(-(end - begin) // 8), begin, end, 0, 0, 0, 0], head
    assert len(want.rows) <= workspace.sorted_rows(m, k, experts, shared) <= b.row_capacity
    n = len(want.tiles)
    table = b.control[workspace.HEAD :][: 5 * b.capacity].view(5, b.capacity)[:, :n]
    assert torch.equal(table, torch.tensor(want.tiles, dtype=torch.int32).view(n, 5).T), (table, want.tiles)
    assert not (table[3] % 4).any()
    met = b.control[workspace.MET : workspace.HEAD]
    assert (met == (0 if parts > 1 else -77)).all()
    done = b.control[workspace.HEAD + 5 * b.capacity :]
    assert not done[:n].any()
    assert not done[b.capacity :][: head[1]].any()
    live = torch.arange(m)[:, None] < valid
    assert torch.equal(b.pos.view(-1)[: m * k].view(m, k).where(live, torch.tensor(-1)).long(), want.position)
    for row, token in enumerate(want.rows.tolist()):
        if 0 <= token < valid and routed == "bf16":
            assert torch.equal(b.xq[row], x[token].to(torch.bfloat16)), (row, token)
        elif 0 <= token < valid:
            values = want.values[token].view(torch.uint8)
            if row >= (m if shared else 0) and routed == "mxfp4":
                values = values.view(-1, 128)[:, pack.column_order()].flatten()
            assert torch.equal(b.xq[row].view(torch.uint8), values), (row, token)
            assert torch.equal(b.xs[:, row], want.scales[token]), (row, token)
    bad = int(((ids[:valid] < -1) | (ids[:valid] >= experts)).sum())
    assert int(layer.strays) == bad
    written = (want.rows >= 0).nonzero().flatten()
    b.d[written] = torch.randn(len(written), hidden, generator=g)
    y = torch.full((m, hidden), float("nan"), dtype=torch.float32)
    step.combine(y)
    expected = oracle.combine(b.d, want.position, weights, call.shared_weights, 1.5, shared, *want.shared, valid)
    assert torch.allclose(y, expected, rtol=1e-6, atol=1e-6), (y - expected).abs().max()
    assert not y[valid:].any()


def main():
    cases = 0
    for seed, (m, k, shared, small) in enumerate(
        itertools.product((1, 3, 17), (0, 1, 6), (True, False), (True, False))
    ):
        if k == 0 and (not shared or not small):
            continue
        most = 2000 if seed % 4 == 1 else None  # kernels of a large batch, as all ranks of a group choose them
        heuristics.SMALL_ROUTES = 8192 if small else m * k if most else 0
        heuristics.ROUTE_BLOCK = 4096 if seed % 2 else 32
        valid = m if seed % 3 else max(0, m - 2)
        rows = ((1, m - 1), (0, m), (6, m), (0, m))[seed % 4]
        check(
            m,
            k,
            5 + seed % 4,
            256 if seed % 2 else 384,
            shared,
            valid,
            rows,
            (torch.int32, torch.int64)[seed % 2],
            (torch.bfloat16, torch.float32, torch.float16)[seed % 3],
            seed,
            seed % 4 > 1,
            (8, 16)[seed % 2],
            seed % 5 == 2,
            ("mxfp4", "fp8", "bf16")[seed // 2 % 3],
            most,
        )
        cases += 1
    print(f"{cases} cases")


if __name__ == "__main__":
    sys.exit(main())
