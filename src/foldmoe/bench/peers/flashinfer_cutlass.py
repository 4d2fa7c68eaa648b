"""FlashInfer's CUTLASS experts on Hopper: MXFP4 weights turned into E4M3 before the product, one scale a token.

Its kernels are compiled where they are used: two modules, the larger of 248 objects, ready-made nowhere on PyPI.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from foldmoe.bench.peers.base import Peer, PeerLayer, hopper, installed
from foldmoe.bench.peers.torch_weights import PlainLinear
from foldmoe.bench.peers.vllm_layer import stored
from foldmoe.formats import Format
from foldmoe.formats.cutting import cut, stack_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foldmoe.bench.shapes import Batch
    from foldmoe.formats import QuantizedTensor
    from foldmoe.moe import ExpertWeights, LayerSpec

PACKAGE = "flashinfer-python==0.7.2.post1"
MODULES = {
    "fused_moe_90": "flashinfer.jit.fused_moe:gen_cutlass_fused_moe_sm90_module",
    "fp8_blockscale_gemm_90": "flashinfer.jit.gemm.fp8_blockscale:gen_fp8_blockscale_gemm_sm90_module",
}
"""Compiled modules that the layer loads, and what compiles each."""

_MULTIPLE = 128
_COMPENSATION = 64.0
"""``preprocess_moe_weights_for_sm90_mixed_gemm_humming``: multiply the residual by 2 ** 6."""


def uncompiled() -> list[str]:
    """Modules that FlashInfer would have to compile first; imports nothing of it."""
    version = PACKAGE.partition("==")[2]
    home = Path(os.environ.get("FLASHINFER_WORKSPACE_BASE", Path.home()))
    found = find_spec("flashinfer")
    folders = (found.submodule_search_locations or []) if found else []
    ahead = [Path(folder) / "data" / "aot" for folder in folders]
    places = [*ahead, home / ".cache" / "flashinfer" / version / "90a" / "cached_ops"]
    return [name for name in MODULES if not any((place / name / f"{name}.so").is_file() for place in places)]


class BlockScaleLinear:
    """``[N, K]`` E4M3 with 128x128 scales; x is rounded with 1x128 scales inside."""

    def __init__(self, weight: QuantizedTensor) -> None:
        self.values, self.scales = weight.values.contiguous(), weight.scale_values().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        from flashinfer.gemm import fp8_blockscale_gemm_sm90

        y: Tensor = fp8_blockscale_gemm_sm90(x, self.values, None, self.scales)
        return y


class FlashInferLayer(PeerLayer):
    """``cutlass_fused_moe``, tuned for the numbers of rows; the shared expert by FlashInfer's FP8 GEMM."""

    def __init__(self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]) -> None:
        self.spec, self.tokens = spec, tuple(sorted(set(tokens)))
        width = spec.routed.width
        gate, up = (cut(routed.gate_up, -2, start, width) for start in (0, width))
        first, second = _folded(stack_rows(up, gate)), _folded(routed.down)
        self.weights = first[0], second[0]
        self.scales = [*first[1:], torch.ones((), device=routed.down.device), *second[1:]]
        self.swiglu = {}
        if (limit := spec.activation.limit) is not None:
            device, count = routed.down.device, spec.routed.count
            for name, value in (("alpha", 1.0), ("beta", 0.0), ("limit", limit)):
                self.swiglu[f"swiglu_{name}"] = torch.full((count,), value, device=device)
        linear = BlockScaleLinear if shared.format is Format.FP8_128x128 else PlainLinear
        self.shared_up, self.shared_down = linear(shared.gate_up[0]), linear(shared.down[0])

    def tune(self, batches: Sequence[Batch]) -> None:
        """Let FlashInfer choose its tactics, once a number of rows; the choices are kept for the process."""
        from flashinfer.autotuner import autotune

        with autotune(True, tuning_buckets=self.tokens):
            for batch in batches:
                self._run(batch)

    def routed(self, batch: Batch) -> Tensor:
        """``[M, H]``, weighted and added."""
        from flashinfer.autotuner import autotune

        with autotune(False, tuning_buckets=self.tokens):
            return self._run(batch)

    def _run(self, batch: Batch) -> Tensor:
        from flashinfer.fused_moe import cutlass_fused_moe

        y = torch.empty_like(batch.x)
        cutlass_fused_moe(
            batch.x,
            batch.topk_ids,
            batch.topk_weights,
            *self.weights,
            torch.bfloat16,
            self.scales,
            output=y,
            use_w4_group_scaling=True,
            use_wfp4afp8_humming=True,
            tune_max_num_tokens=self.tokens[-1],
            **self.swiglu,
        )
        return y

    def shared(self, batch: Batch) -> Tensor:
        from foldmoe.bench.peers.gated import silu_and_mul

        return self.shared_down(silu_and_mul(self.shared_up(batch.x), self.spec.shared_activation.limit))


def _folded(weight: QuantizedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """MXFP4 ``[E, N, K]`` as FlashInfer's kernels read it: weight, int32 scales, one float32 residual an expert."""
    from flashinfer.fused_moe import preprocess_moe_weights_for_sm90_mixed_gemm_humming

    assert weight.scales is not None
    parts = [  # one expert at a time: FlashInfer takes 16 bytes a code meanwhile
        preprocess_moe_weights_for_sm90_mixed_gemm_humming(codes[None], scales[None])
        for codes, scales in zip(weight.values.view(torch.uint8), weight.scales.view(torch.uint8), strict=True)
    ]
    values, scales, residuals = (torch.cat(part) for part in zip(*parts, strict=True))
    return values, scales.view(torch.int32), residuals * _COMPENSATION


class FlashInferCutlass(Peer):
    """W4A8, one scale a token, CUTLASS (Humming's scheme); the shared expert by FlashInfer's FP8 block-scale GEMM."""

    name = "flashinfer"
    package = PACKAGE
    tolerance = 0.08

    def refusals(self, spec: LayerSpec, device: torch.device) -> list[str]:
        found = [reason] if (reason := installed(self.package)) else []
        if not found:
            found += [
                f"FlashInfer's module {name} is not compiled: on a machine with nvcc run python -c "
                f"'from {' import '.join(MODULES[name].split(':'))} as spec; spec().build_and_load()'"
                for name in uncompiled()
            ]
        found += [reason] if (reason := hopper(device)) else []
        if spec.hidden % _MULTIPLE or spec.routed.width % _MULTIPLE:
            found.append(f"takes multiples of {_MULTIPLE}, found hidden {spec.hidden} and width {spec.routed.width}")
        return found + stored(spec)

    def prepare(
        self, spec: LayerSpec, routed: ExpertWeights, shared: ExpertWeights, tokens: Sequence[int]
    ) -> PeerLayer:
        from foldmoe.bench.shapes import random_batch

        layer = FlashInferLayer(spec, routed, shared, tokens)
        generator = torch.Generator(routed.down.device).manual_seed(0)
        layer.tune([random_batch(spec, count, generator) for count in layer.tokens])
        return layer
