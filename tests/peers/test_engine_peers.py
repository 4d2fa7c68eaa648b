"""vLLM's, DeepGEMM's and FlashInfer's peers without a GPU: layers over torch stand-ins, calls by real signatures."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe import Format
from foldmoe.bench.peers import PEERS, base, flashinfer_cutlass, fp8_experts, gated, marlin, megamoe

from . import reference, signatures, support

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")
TOKENS = (1, 9)


def _deepgemm(recorder: signatures.Recorder) -> None:
    reference.vllm(recorder)
    reference.vllm_permutation(recorder)


STAND_INS: dict[str, Callable[[signatures.Recorder], None]] = {
    "marlin": reference.marlin,
    "triton-kernels": reference.triton_kernels,
    "deepgemm": _deepgemm,
    "megamoe": reference.deep_gemm,
    "flashinfer": reference.flashinfer,
}


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> signatures.Recorder:
    monkeypatch.setattr(gated, "silu_and_mul", lambda x, limit: reference.gated(x, limit).to(x.dtype))
    return signatures.Recorder(monkeypatch)


def _run(name: str, recorder: signatures.Recorder, shared: Format = Format.FP8_128x128) -> list[float]:
    """Errors of a small layer, one a number of tokens."""
    STAND_INS[name](recorder)
    spec, weights = support.layer(shared=shared)
    peer = PEERS[name]
    run = base.step(peer.prepare(spec, *weights, TOKENS), peer.arms[0], CPU)
    return [base.check(peer, run(batch), batch, spec, *weights) for batch in (support.batch(spec, t) for t in TOKENS)]


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_the_launches_make_up_the_layer(name: str, recorder: signatures.Recorder) -> None:
    limit = PEERS[name].tolerance if name == "megamoe" else 0.01  # the other stand-ins round no activations
    assert max(_run(name, recorder)) < limit


@pytest.mark.parametrize("name", ["deepgemm", "flashinfer", "marlin", "triton-kernels"])
def test_shared_experts_with_32x32_blocks_run_in_bf16(name: str, recorder: signatures.Recorder) -> None:
    _run(name, recorder, Format.FP8_32x32)
    assert ("vllm.utils.deep_gemm", "fp8_gemm_nt") not in recorder.calls
    assert ("flashinfer.gemm", "fp8_blockscale_gemm_sm90") not in recorder.calls


_LAYERS = "vllm.model_executor.layers"
DEFINED_IN: dict[str, tuple[str, ...]] = {
    f"{_LAYERS}.fused_moe.activation": (),
    f"{_LAYERS}.fused_moe.deep_gemm_utils": (),
    f"{_LAYERS}.fused_moe.experts.gpt_oss_triton_kernels_moe": (),
    f"{_LAYERS}.fused_moe.experts.marlin_moe": (),
    f"{_LAYERS}.quantization.utils.fp8_utils": (),
    f"{_LAYERS}.quantization.utils.marlin_utils_fp4": (),
    f"{_LAYERS}.quantization.utils.mxfp4_utils": (),
    "vllm.utils.deep_gemm": (),
    "triton_kernels.matmul_ogs": ("vllm.third_party.triton_kernels.matmul_ogs",),
    "deep_gemm": (),
    "deep_gemm.utils.math": (),
    "flashinfer.autotuner": ("flashinfer.autotuner.autotuner",),
    "flashinfer.fused_moe": ("flashinfer.fused_moe.core", "flashinfer.fused_moe.prepare"),
    "flashinfer.gemm": ("flashinfer.gemm.gemm_base",),
}
"""Modules that peers import functions from, and where those are defined, if elsewhere."""


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_calls_fit_the_signatures_in_the_libraries_source(name: str, recorder: signatures.Recorder) -> None:
    reason = base.installed(PEERS[name].package)
    if reason and "PEER_SOURCES" not in os.environ:
        pytest.skip(f"{reason}; or PEER_SOURCES=folder of its unpacked wheel")
    _run(name, recorder)
    assert recorder.calls
    for (module, function), calls in recorder.calls.items():
        paths = [signatures.source(place) for place in DEFINED_IN[module] or (module,)]
        if None in paths:
            pytest.skip(f"no source of {module} in PEER_SOURCES={os.environ['PEER_SOURCES']}")
        found = [one for path in paths if path and (one := signatures.signature(path, function))]
        assert found, f"none of {paths} defines {function}"
        for args, kwargs in calls:
            found[0].bind(*args, **kwargs)


def test_experts_in_block_fp8_keep_mxfp4_exact_and_the_shared_one_as_it_is() -> None:
    _, (routed, shared) = support.layer()
    values = reference.blocks(fp8_experts.block_fp8(routed.down, shared.down))
    assert torch.equal(values[:-1], routed.down.dequantize())
    assert torch.equal(values[-1], shared.down[0].dequantize())


def test_marlin_is_given_what_the_checkpoint_holds_and_keeps_it() -> None:
    _, (routed, _) = support.layer()
    given = vars(marlin.marlin_layer(routed))
    for name, stored in (("w13", routed.gate_up), ("w2", routed.down)):
        assert torch.equal(reference.mxfp4(given[f"{name}_weight"], given[f"{name}_weight_scale"]), stored.dequantize())


def test_one_more_route_goes_to_the_shared_expert_at_weight_1() -> None:
    spec, _ = support.layer()
    batch = support.batch(spec, 3)
    ids, weights = megamoe.one_more(batch, 4)
    assert torch.equal(ids[:, :2], batch.topk_ids)
    assert torch.equal(weights[:, :2], batch.topk_weights)
    assert (ids[:, 2] == 4).all()
    assert (weights[:, 2] == 1).all()
    assert ids.dtype == torch.int32


def test_megamoe_has_one_buffer_a_capacity_and_one_arm(recorder: signatures.Recorder) -> None:
    reference.deep_gemm(recorder)
    spec, weights = support.layer()
    layer = PEERS["megamoe"].prepare(spec, *weights, (1, 8, 9))
    assert isinstance(layer, megamoe.MegaLayer)
    assert sorted(layer.buffers) == [8, 16]
    assert PEERS["megamoe"].arms == ("folded",)


@pytest.mark.parametrize("name", sorted(STAND_INS))
def test_refusals_say_what_is_missing(name: str) -> None:
    spec, _ = support.layer(routed=Format.BF16, shared=Format.BF16)
    reasons = "; ".join(PEERS[name].refusals(spec, CPU))
    assert "needs a Hopper GPU, asked for cpu" in reasons
    assert "routed experts are bf16; this peer is for mxfp4" in reasons
    assert "the shared expert is not block FP8" in reasons


def test_flashinfer_says_which_module_to_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec, _ = support.layer()
    monkeypatch.setattr(flashinfer_cutlass, "installed", lambda package: None)
    monkeypatch.setenv("FLASHINFER_WORKSPACE_BASE", str(tmp_path))
    reasons = PEERS["flashinfer"].refusals(spec, CPU)
    assert "FlashInfer's module fused_moe_90 is not compiled" in reasons[0]
    assert "from flashinfer.jit.fused_moe import gen_cutlass_fused_moe_sm90_module as spec" in reasons[0]
    version = flashinfer_cutlass.PACKAGE.partition("==")[2]
    for name in flashinfer_cutlass.MODULES:
        built = tmp_path / ".cache" / "flashinfer" / version / "90a" / "cached_ops" / name / f"{name}.so"
        built.parent.mkdir(parents=True)
        built.touch()
    assert not [reason for reason in PEERS["flashinfer"].refusals(spec, CPU) if "not compiled" in reason]


def test_vllm_beside_another_deep_gemm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from foldmoe.bench.peers import vllm_layer

    spec, _ = support.layer()
    monkeypatch.setattr(vllm_layer, "find_spec", lambda name: object())
    assert any("another environment" in reason for reason in PEERS["marlin"].refusals(spec, CPU))


def test_widths_are_refused_where_the_kernels_take_none() -> None:
    from foldmoe.bench import shapes

    spec = shapes._spec(1088, 4, 96, Format.MXFP4, Format.FP8_32x32, 1.0, top_k=2)
    for name, reason in (
        ("marlin", "vLLM pads hidden sizes to 256 and widths to 128"),
        ("deepgemm", "DeepGEMM takes multiples of 128"),
        ("deepgemm", "multiples of 1024 columns"),
        ("megamoe", "takes multiples of 128, hidden sizes up to 8192"),
        ("flashinfer", "takes multiples of 128"),
    ):
        assert reason in "; ".join(PEERS[name].refusals(spec, CPU)), name
