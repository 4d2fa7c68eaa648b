"""The launches of one forward call: buffers, grids, arguments."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foldmoe.backends.triton import arguments
from foldmoe.backends.triton.config import ONE_PROGRAM_ROUTES, UP_ROWS
from foldmoe.backends.triton.kernels import combine as combine_kernel
from foldmoe.backends.triton.kernels import gemm, routing
from foldmoe.backends.triton.kernels import prepare as prepare_kernel
from foldmoe.backends.triton.launch import launch
from foldmoe.runtime.workspace import Carve

if TYPE_CHECKING:
    from foldmoe.backends.base import Call
    from foldmoe.backends.triton.config import TritonConfig
    from foldmoe.backends.triton.layer import TritonLayer
    from foldmoe.backends.triton.layout import Experts, Matrix

_ROUNDING = {"bf16": 0, "fp8": 1, "fp8_token": 2}
_SCAN_COLUMNS = 32
_SCAN_ROWS = 64


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _padded(columns: int) -> int:
    return _ceil(columns, 128) * 128


class Step:
    """Buffers of one call and the launches over them.

    Args:
        layer: weights, clamps and precision.
        call: checked arguments, at least one row.
        routed, shared: the sets that take part.
        config: shapes of the launches.
        strays: int64 counter of ids out of range.
    """

    def __init__(
        self,
        layer: TritonLayer,
        call: Call,
        routed: Experts | None,
        shared: Experts | None,
        config: TritonConfig,
        strays: Tensor,
    ) -> None:
        self.layer, self.config, self.strays = layer, config, strays
        self.routed, self.shared = routed, shared
        self.tokens, self.hidden = call.x.shape
        self.top_k = call.topk_ids.shape[1] if routed else 0
        self.routes = self.tokens * self.top_k
        one_program = call.sized_for * self.top_k <= ONE_PROGRAM_ROUTES
        self.chunks = 0 if one_program else _ceil(self.routes, routing.CHUNK.value)
        self.round = _ROUNDING[layer.activations]
        self.x = arguments.aligned(call.x)
        self.ids = call.topk_ids.contiguous()
        self.weights = call.topk_weights.contiguous()
        self.shared_weights = None if call.shared_weights is None else call.shared_weights.contiguous()
        self.routed_scale = float(call.routed_scale)
        self.valid, self.valid_tensor = arguments.host_or_device(call.num_valid_tokens, self.tokens, self.x.device)
        rows = (0, self.tokens) if call.shared_rows is None else call.shared_rows
        self.start, self.end, self.rows_tensor = arguments.host_or_device_rows(rows, self.x.device)
        self.capacity = 0
        if routed:
            tile = config.up.routed_tokens
            if tile != config.down.routed_tokens:
                raise ValueError(f"one tile table serves both GEMMs, but they take different token tiles: {config}")
            self.capacity = min(self.routes, min(routed.count, self.routes) + self.routes // tile)
        self.experts_padded = max(32, 1 << (routed.count - 1).bit_length()) if routed else 0
        self.orders = self._orders()
        self.buffers = self._carve()

    def _orders(self) -> list[tuple[int, int]]:
        """Column orders in which x has to be written; none where the GEMMs take it as it is."""
        orders: list[tuple[int, int]] = []
        for experts in (self.routed, self.shared):
            if experts is None or self._takes_x_as_is(experts.gate_up) or experts.gate_up.order in orders:
                continue
            orders.append(experts.gate_up.order)
        return orders

    def _takes_x_as_is(self, matrix: Matrix) -> bool:
        return self.round == 0 and self.x.dtype == torch.bfloat16 and matrix.planes == 1

    def _carve(self) -> dict[str, Tensor]:
        carve = Carve()
        carve.add("facts", (4,), torch.int32)
        carve.add("order", (self.routes,), torch.int32)
        carve.add("tiles", (3, self.capacity), torch.int32)
        carve.add("counts", (self.chunks, self.experts_padded), torch.int32)
        carve.add("totals", (self.experts_padded,), torch.int32)
        for i in range(len(self.orders)):
            carve.add(f"x{i}", (self.tokens, _padded(self.hidden)), torch.bfloat16)
        for name, experts, rows in self._sets():
            carve.add(f"hidden_{name}", (rows, _padded(experts.width)), torch.bfloat16)
        carve.add("slots", (self.routes + (self.tokens if self.shared else 0), self.hidden), torch.float32)
        return carve.take(self.x.device)

    def _sets(self) -> list[tuple[str, Experts, int]]:
        sets = (("r", self.routed, self.routes), ("s", self.shared, self.tokens))
        return [(name, experts, rows) for name, experts, rows in sets if experts is not None]

    def prepare(self) -> None:
        """Sort the routes, round x."""
        b, chunks = self.buffers, self.chunks
        programs = chunks or 1
        blocks = self.tokens * _ceil(self.hidden, prepare_kernel.COLUMNS.value) if self.orders else 0
        (first, first_step), (second, second_step) = [*self.orders, (0, 128), (0, 128)][:2]
        x0 = b.get("x0", b["facts"])
        experts = self.routed.count if self.routed else 0
        tile = self.config.up.routed_tokens
        launch(
            prepare_kernel.prepare,
            (programs + blocks,),
            {
                "x": self.x, "ids": self.ids, "valid_ptr": self._or_facts(self.valid_tensor),
                "rows_ptr": self._or_facts(self.rows_tensor), "order": b["order"], "tiles": b["tiles"],
                "facts": b["facts"], "counts": b["counts"], "strays": self.strays, "first_out": x0,
                "second_out": b.get("x1", x0),
            },
            {
                "tokens": self.tokens, "hidden": self.hidden, "out_stride": _padded(self.hidden), "top_k": self.top_k,
                "experts": experts, "capacity": self.capacity, "tile_tokens": tile, "route_programs": programs,
                "valid": self.valid, "start": self.start, "end": self.end,
            },
            EP=self.experts_padded, ONE_PROGRAM=not chunks, ROUND=self.round, FIRST=first, FIRST_BK=first_step,
            SECOND=second, SECOND_BK=second_step,
        )  # fmt: skip
        if not chunks:
            return
        launch(
            routing.scan, (self.experts_padded // _SCAN_COLUMNS,), {"counts": b["counts"], "totals": b["totals"]},
            {"chunks": chunks}, EP=self.experts_padded, COLUMNS=_SCAN_COLUMNS, ROWS=_SCAN_ROWS,
        )  # fmt: skip
        launch(
            routing.scatter,
            (chunks + _ceil(self.capacity, routing.TILE_BLOCK.value),),
            {
                "ids": self.ids, "counts": b["counts"], "totals": b["totals"], "order": b["order"], "tiles": b["tiles"],
                "facts": b["facts"],
            },
            {
                "chunks": chunks, "top_k": self.top_k, "experts": experts, "capacity": self.capacity,
                "tile_tokens": tile,
            },
            EP=self.experts_padded,
        )  # fmt: skip

    def _or_facts(self, tensor: Tensor | None) -> Tensor:
        """Something to point at where nothing is read."""
        return self.buffers["facts"] if tensor is None else tensor

    def _input(self, matrix: Matrix | None) -> Tensor:
        if matrix is None or self._takes_x_as_is(matrix):
            return self.x
        return self.buffers[f"x{self.orders.index(matrix.order)}"]

    def multiply(self, routed: Experts | None, shared: Experts | None) -> None:
        """Both grouped GEMMs of one set of experts, or of both in the same grids."""
        self.up(routed, shared)
        self.down(routed, shared)

    def up(self, routed: Experts | None, shared: Experts | None) -> None:
        """Gate, up, SwiGLU and rounding, into the hidden buffers."""
        c = self.config.up
        shared_programs = _ceil(self.tokens, c.shared_tokens) * _ceil(shared.width, UP_ROWS) if shared else 0
        programs = shared_programs + (self.capacity * _ceil(routed.width, UP_ROWS) if routed else 0)
        tensors, numbers = self._operands("r", arguments.gate_up(routed), self._input(arguments.gate_up(routed)))
        more, others = self._operands("s", arguments.gate_up(shared), self._input(arguments.gate_up(shared)))
        activations = {"r": self.layer.activation, "s": self.layer.shared_activation}
        constants: dict[str, Any] = {}
        for name, experts in (("r", routed), ("s", shared)):
            out = self.buffers[f"hidden_{name}"] if experts else self.buffers["facts"]
            limit = activations[name].limit
            tensors[f"{name}_out"] = out
            numbers[f"{name}_out_stride"] = out.stride(0)
            numbers[f"{name}_width"] = experts.width if experts else 0
            numbers[f"{name}_limit"] = inf if limit is None else limit
            prefix = name.upper()
            constants[f"{prefix}_LIMIT"] = limit is not None and experts is not None
            constants[f"{prefix}_OUT_PLANES"], constants[f"{prefix}_OUT_BK"] = (
                experts.down.order if experts else (1, 128)
            )
        launch(
            gemm.up,
            (programs,),
            self._tables() | tensors | more,
            {
                "capacity": self.capacity, "top_k": self.top_k, "hidden": self.hidden,
                "shared_programs": shared_programs, **numbers, **others,
            },
            ROUTED=routed is not None, SHARED=shared is not None, ROUND=self.round > 0, BN=UP_ROWS,
            R_BM=c.routed_tokens, S_BM=c.shared_tokens, **arguments.constants("R", arguments.gate_up(routed)),
            **arguments.constants("S", arguments.gate_up(shared)), **constants, num_warps=c.warps, num_stages=c.stages,
        )  # fmt: skip

    def down(self, routed: Experts | None, shared: Experts | None) -> None:
        """Down projections, into the slots."""
        c = self.config.down
        blocks = _ceil(self.hidden, c.rows)
        shared_programs = _ceil(self.tokens, c.shared_tokens) * blocks if shared else 0
        programs = shared_programs + (self.capacity * blocks if routed else 0)
        tensors, numbers = self._operands("r", arguments.down(routed), self._hidden("r", routed))
        more, others = self._operands("s", arguments.down(shared), self._hidden("s", shared))
        numbers |= {"r_width": routed.width if routed else 0, "s_width": shared.width if shared else 0}
        launch(
            gemm.down,
            (programs,),
            self._tables() | {"slots": self.buffers["slots"]} | tensors | more,
            {
                "tokens": self.tokens, "capacity": self.capacity, "top_k": self.top_k, "hidden": self.hidden,
                "shared_programs": shared_programs, **numbers, **others,
            },
            ROUTED=routed is not None, SHARED=shared is not None, BN=c.rows, R_BM=c.routed_tokens, S_BM=c.shared_tokens,
            **arguments.constants("R", arguments.down(routed)), **arguments.constants("S", arguments.down(shared)),
            num_warps=c.warps, num_stages=c.stages,
        )  # fmt: skip

    def _hidden(self, name: str, experts: Experts | None) -> Tensor:
        return self.buffers[f"hidden_{name}"] if experts else self.x

    def _tables(self) -> dict[str, Tensor]:
        return {name: self.buffers[name] for name in ("facts", "tiles", "order")}

    def _operands(self, name: str, matrix: Matrix | None, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """A set's pointers and strides; where it takes no part, anything that is there."""
        if matrix is None:
            facts = self.buffers["facts"]
            tensors = dict.fromkeys((f"{name}_x", f"{name}_w", f"{name}_s"), facts)
            strides = [0, 0, 0, 0, 0, 0]
        else:
            tensors = {f"{name}_x": x, f"{name}_w": matrix.words, f"{name}_s": matrix.scales}
            words, scales = matrix.words.stride(), matrix.scales.stride()
            strides = [x.stride(0), words[0], words[1], *scales]
        names = ["x_stride", "w_expert", "w_row", "s_expert", "s_row", "s_col"]
        numbers = {f"{name}_{key}": value for key, value in zip(names, strides, strict=True)}
        if name == "s":  # one expert
            numbers = {key: value for key, value in numbers.items() if not key.endswith("_expert")}
        return tensors, numbers

    def combine(self, y: Tensor) -> None:
        """Weigh and add, in the order of k."""
        columns = self.config.combine_columns
        weights = self.weights if self.shared_weights is None else self.shared_weights
        launch(
            combine_kernel.combine,
            (self.tokens, _ceil(self.hidden, columns)),
            {
                "slots": self.buffers["slots"], "ids": self.ids, "weights": self.weights, "shared_weights": weights,
                "facts": self.buffers["facts"], "y": y,
            },
            {
                "tokens": self.tokens, "hidden": self.hidden, "top_k": self.top_k,
                "experts": self.routed.count if self.routed else 0, "routed_scale": self.routed_scale,
            },
            ROUTED=self.routed is not None, SHARED=self.shared is not None,
            SHARED_WEIGHTS=self.shared_weights is not None, COLUMNS=columns,
        )  # fmt: skip
