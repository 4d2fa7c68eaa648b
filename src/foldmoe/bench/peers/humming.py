"""humming-kernels: JIT-compiled indexed GEMMs for MXFP4 experts, and its dense FP8 GEMM for the shared expert.

The launches are those of vLLM 0.33's ``HummingIndexedExperts``: align routes, round x, GEMM 1, clamp, SwiGLU and round,
GEMM 2, weighted sum.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from foldmoe.bench.peers import vllm_ops
from foldmoe.bench.peers.base import Peer, PeerLayer, hopper, installed
from foldmoe.bench.peers.humming_weights import SCHEMAS, tensors
from foldmoe.formats import Format

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.formats import QuantizedTensor
    from foldmoe.moe import Activation, ExpertWeights, LayerSpec

_LOCKS = 2048
"""Stream-K counters of a matrix (``humming.layer.HummingLayer``); matrices on two streams must not share them."""

_PAD_N, _PAD_K = 256, 128  # what vLLM pads to


@dataclass
class Matrix:
    """One projection of one set of experts in humming's layout.

    Args:
        stored: ``[E, N, K]`` for a routed set, ``[N, K]`` for the shared expert.
        inputs: arguments of ``HummingInputSchema``: number format and group of the activations.
    """

    stored: QuantizedTensor
    inputs: dict[str, Any]
    _tunings: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from humming.transform import transform_humming_tensors

        device = self.stored.device
        given = tensors(self.stored)
        self.config = layer_config(self.stored.shape, self.stored.format, self.inputs, device)
        self.tensors = transform_humming_tensors(self.config, given)
        self.locks = torch.zeros(_LOCKS, dtype=torch.int32, device=device)
        self.gemm = "indexed" if self.config.num_experts else "dense"

    def tuning(self, rows: int) -> dict[str, Any]:
        """Humming's own choice of tiles for this many routed rows."""
        if rows not in self._tunings:
            self._tunings[rows] = tuning(self.config, rows, self.gemm, self.stored.device)
        return self._tunings[rows]

    def block(self, rows: int) -> int:
        """Rows of a tile."""
        return int(self.tuning(rows)["block_shape"][0])

    def round(self, x: Tensor, activation: Activation | None = None) -> tuple[Tensor, Tensor | None]:
        """x (or the activation of x's gate and up halves) as the GEMM takes it, with its scales."""
        from humming.forward import may_process_input

        kind = {} if activation is None else {"activation_type": "binary_split", "activation_impl": cxx(activation)}
        rounded, groups, token = may_process_input(self.config, inputs=x, **kind)
        return rounded, token if groups is None else groups

    def __call__(
        self, x: tuple[Tensor, Tensor | None], rows: int, aligned: tuple[Tensor, Tensor, Tensor] | None, top_k: int = 1
    ) -> Tensor:
        """``[rows, N]`` bf16; ``rows`` counts routes where experts are routed, ``top_k`` routes share a row of x."""
        from humming.forward import humming_forward

        order, experts, padded = aligned or (None, None, None)
        n = self.config.shape_n - self.config.pad_shape_n
        y: Tensor = humming_forward(
            self.config,
            inputs=x[0],
            input_scale=x[1],
            outputs=torch.empty(rows, n, dtype=torch.bfloat16, device=x[0].device),
            sorted_ids=order,
            expert_ids=experts,
            num_tokens_padded=padded,
            locks=self.locks,
            top_k=top_k,
            valid_shape_m=rows,
            compute_config=compute_config(self.gemm),
            tuning_config=json.dumps(self.tuning(rows)),
            **self.tensors,
        )
        return y


def cxx(activation: Activation) -> str:
    """The gated activation of gate ``a`` and up ``b`` as humming's CUDA C++ takes it."""
    if activation.limit is None:
        return "a / (1.f + expf(-a)) * b"
    limit = f"{activation.limit!r}f"
    return f"fminf(a, {limit}) / (1.f + expf(-fminf(a, {limit}))) * fmaxf(fminf(b, {limit}), -{limit})"


def compute_config(gemm: str) -> str:
    """Humming's compute config for a kind of GEMM, as JSON."""
    return json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": gemm})


def layer_config(shape: Sequence[int], stored: Format, inputs: dict[str, Any], device: torch.device) -> Any:
    """``humming.config.LayerConfig`` of an ``[E, N, K]`` or ``[N, K]`` matrix; reads no weights."""
    from humming.schema import HummingInputSchema, HummingWeightSchema
    from humming.transform import prepare_layer_config

    return prepare_layer_config(
        shape_n=shape[-2],
        shape_k=shape[-1],
        weight_schema=HummingWeightSchema(**SCHEMAS[stored]),
        input_schema=HummingInputSchema(**inputs),
        num_experts=shape[0] if len(shape) == 3 else None,
        pad_n_to_multiple=_PAD_N,
        pad_k_to_multiple=_PAD_K,
        torch_dtype=torch.bfloat16,
        device=device,
    )


def tuning(config: Any, rows: int, gemm: str, device: torch.device) -> dict[str, Any]:
    """Humming's heuristics for one number of rows; the whole table takes it seconds a matrix."""
    from humming.tune import get_heuristics_config

    found: dict[str, Any] = json.loads(
        json.dumps(get_heuristics_config(config, shape_m=rows, gemm_type=gemm, device=device))
    )
    return found


def kernel_arguments(config: Any, chosen: dict[str, Any], gemm: str) -> dict[str, Any]:
    """Arguments of ``humming.kernel.humming.HummingKernel``, as a launch would give them."""
    merged: dict[str, Any] = json.loads(config.to_str()) | json.loads(compute_config(gemm)) | chosen
    merged.pop("num_sms", None)
    return merged


class HummingLayer(PeerLayer):
    """Routed and shared experts."""

    def __init__(self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, inputs: dict[str, Any]) -> None:
        self.spec = spec
        self.up, self.down = Matrix(routed.gate_up, inputs), Matrix(routed.down, inputs)
        alone = shared_inputs(shared.format)
        self.shared_up, self.shared_down = Matrix(shared.gate_up[0], alone), Matrix(shared.down[0], alone)

    def routed(self, batch: Batch) -> Tensor:
        """``[M * K, H]``, one row a route."""
        rows, top_k = batch.topk_ids.numel(), batch.topk_ids.shape[1]
        aligned = vllm_ops.align(batch.topk_ids, self.up.block(rows), self.spec.routed.count)
        again = aligned
        if self.down.block(rows) != self.up.block(rows):
            again = vllm_ops.align(batch.topk_ids, self.down.block(rows), self.spec.routed.count)
        hidden = self.up(self.up.round(batch.x), rows, aligned, top_k)
        return self.down(self.down.round(hidden, self.spec.activation), rows, again)

    def shared(self, batch: Batch) -> Tensor:
        rows = len(batch.x)
        hidden = self.shared_up(self.shared_up.round(batch.x), rows, None)
        return self.shared_down(self.shared_down.round(hidden, self.spec.shared_activation), rows, None)

    def combine(self, batch: Batch, routed: Tensor, shared: Tensor) -> Tensor:
        from foldmoe.bench.peers.combine import weighted_sum

        return weighted_sum(routed, batch.topk_weights, shared)

    def compile(self, tokens: Sequence[int]) -> None:
        """Compile every GEMM at once, on all cores."""
        from humming.kernel.humming import HummingKernel

        wanted: dict[str, dict[str, Any]] = {}
        for matrix in (self.up, self.down, self.shared_up, self.shared_down):
            for rows in (count * (self.spec.top_k if matrix.gemm == "indexed" else 1) for count in tokens):
                arguments = kernel_arguments(matrix.config, matrix.tuning(rows), matrix.gemm)
                wanted[json.dumps(arguments)] = arguments
        HummingKernel.compile_many([(HummingKernel, one) for one in wanted.values()], self.up.stored.device)


class _Humming(Peer):
    """MXFP4 routed experts; the shared expert by humming's dense FP8 GEMM."""

    package = "humming-kernels==0.1.19"
    inputs: ClassVar[dict[str, Any]]

    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        found = [reason for reason in (installed(self.package), vllm_ops.missing(), hopper(device)) if reason]
        if spec.routed.format is not Format.MXFP4:
            found.append(f"routed experts are {spec.routed.format.value}; this peer is for mxfp4")
        if spec.shared is None or spec.shared.format not in (Format.FP8_128x128, Format.FP8_32x32):
            found.append("the shared expert is not block FP8")
        return found

    def prepare(
        self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]
    ) -> PeerLayer:
        vllm_ops.load()
        layer = HummingLayer(spec, routed, shared, self.inputs)
        layer.compile(tokens)
        return layer


def shared_inputs(stored: Format) -> dict[str, Any]:
    """W8A8 with 1x128 scales for 128x128 blocks; humming has no such kernel for 32x32 ones, which run W8A16."""
    if stored is Format.FP8_128x128:
        return {"a_dtype": "float8e4m3", "input_scale_group_size": 128}
    return {"a_dtype": "bfloat16"}


class HummingGroup(_Humming):
    """W4A8, one scale per token per 128 columns: vLLM 0.33's default on Hopper."""

    name = "humming"
    tolerance = 0.08
    inputs: ClassVar[dict[str, Any]] = {"a_dtype": "float8e4m3", "input_scale_group_size": 128}


class HummingToken(_Humming):
    """W4A8, one scale per token: fewer promotions."""

    name = "humming-token"
    tolerance = 0.08
    inputs: ClassVar[dict[str, Any]] = {"a_dtype": "float8e4m3"}


class HummingBf16(_Humming):
    """W4A16: activations as they are."""

    name = "humming-w4a16"
    tolerance = 0.08  # the shared expert, most of the output, is W8A8
    inputs: ClassVar[dict[str, Any]] = {"a_dtype": "bfloat16"}
