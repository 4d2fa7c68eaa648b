"""Plain torch versions of what surrounds the launch: sorted rows, tile table, combine."""

from dataclasses import dataclass

import torch

from foldmoe.backends.hopper import pack, workspace
from foldmoe.formats import fp8


@dataclass
class Sorted:
    """What the prologue should have written."""

    rows: torch.Tensor  # source token of every sorted row, -1 in the gaps
    position: torch.Tensor  # [M, K]
    tiles: list  # (expert, first entry, entries, first row, end of rows) of every routed token tile
    shared: tuple  # first and end shared row
    values: torch.Tensor
    scales: torch.Tensor


def sort_routes(x, ids, experts, shared, valid, shared_rows, tile, whole):
    """Routes by (expert, token, k), every expert from a multiple of 4 on, after a row a token for the shared expert."""
    m, k = ids.shape
    valid = max(0, min(m, valid))
    live = (ids >= 0) & (ids < experts) & (torch.arange(m)[:, None] < valid)
    flat = ids.flatten().long().where(live.flatten(), torch.tensor(experts))
    position = torch.full((m * k,), -1)
    rows = list(range(m)) if shared else []
    tiles = []
    for e in range(experts):
        rows += [-1] * (-len(rows) % 4)
        routes = (flat == e).nonzero().flatten().tolist()
        position[routes] = torch.arange(len(rows), len(rows) + len(routes))
        parts = -(-len(routes) // tile)
        tiles += [(e, len(tiles), parts, len(rows), len(rows) + len(routes))] * parts
        rows += [route // k for route in routes]
    values, scales = fp8.quantize_activations(x.float(), None if whole else 128)
    scales = scales.expand(m, x.shape[1] // 128)
    begin = max(0, min(shared_rows[0], valid)) if shared else 0
    end = max(begin, min(shared_rows[1], valid)) if shared else 0
    return Sorted(torch.tensor(rows), position.view(m, k), tiles, (begin, end), values, scales)


def fill(b, found, x, permuted, shared_tile):
    """What the prologue should have left in the workspace's buffers ``b``; NaN in the gaps.

    Args:
        permuted: routed rows in the order of ``pack.column_order``.
        shared_tile: rows of a shared token tile; 0 without a shared expert.
    """
    quantised = b.xq.dtype is not torch.bfloat16
    for row, token in enumerate(found.rows.tolist()):
        if token >= 0:
            values = found.values[token] if quantised else x[token].to(b.xq.dtype)
            if permuted and not (shared_tile and row < found.position.shape[0]):
                values = values.view(torch.uint8).view(-1, 128)[:, pack.column_order()].flatten().view(values.dtype)
            b.xq[row] = values
            b.xs[:, row] = found.scales[token]
    begin, end = found.shared
    tiles = len(found.tiles)
    b.control.zero_()
    b.control[:4] = torch.tensor((tiles, -(-(end - begin) // shared_tile) if shared_tile else 0, begin, end))
    table = torch.tensor(found.tiles, dtype=torch.int32).view(tiles, 5).T
    b.control[workspace.HEAD :][: 5 * b.capacity].view(5, b.capacity)[:, :tiles] = table


def combine(d, position, weights, shared_weights, routed_scale, shared, begin, end, valid):
    """Float32, k after k, shared last."""
    m, k = position.shape
    y = torch.zeros(m, d.shape[1])
    for t in range(valid):
        for i in range(k):
            if position[t, i] >= 0:
                y[t] += (weights[t, i] * routed_scale) * d[position[t, i]]
        if shared and begin <= t < end:
            y[t] += d[t] * (1.0 if shared_weights is None else shared_weights[t])
    return y
