"""torch's and Transformers' peers: layouts against the stored numbers, whole layers against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from foldmoe import Format
from foldmoe.bench.peers import PEERS, base, torch_grouped, torch_weights

from . import support

CPU = torch.device("cpu")


@pytest.mark.parametrize("format", [Format.MXFP4, Format.FP8_128x128, Format.BF16])
@pytest.mark.parametrize("name", ["torch-bf16", "transformers"])
def test_bf16_layers_match_the_oracle(name: str, format: Format) -> None:
    spec, weights = support.layer(format, Format.BF16 if format is Format.BF16 else Format.FP8_128x128)
    peer = PEERS[name]
    if reasons := peer.refusals(spec, CPU):
        pytest.skip("; ".join(reasons))
    run = base.step(peer.prepare(spec, *weights, (1, 9)), "serial", CPU)
    for tokens in (1, 9):
        batch = support.batch(spec, tokens)
        assert base.check(peer, run(batch), batch, spec, *weights) < peer.tolerance


def test_one_scale_a_row_keeps_mxfp4_exact() -> None:
    _, (routed, _) = support.layer()
    values, scales = torch_weights.per_row(routed.gate_up)
    assert torch.equal(values.to(torch.float32) * scales[..., None], routed.gate_up.dequantize())


def test_rounded_activations_are_close_and_zero_rows_stay_zero() -> None:
    x = torch.randn(6, 256)
    x[2] = 0
    for values, scales in (torch_weights.round_rows(x), torch_weights.round_groups(x)):
        wide = scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(128, dim=-1)
        back = values.to(torch.float32) * wide
        assert torch.equal(back[2], x[2])
        assert float((back - x).norm() / x.norm()) < 0.03


def _scaled_mm(a: Tensor, b: Tensor, sa: Tensor, kind_a: Any, sb: Tensor, kind_b: Any, *, output_dtype: Any) -> Tensor:
    """cuBLAS's 1x128 by 128x128 product in torch, with the strides it asks for."""
    kinds = functional.ScalingType
    assert (kind_a, kind_b) == (kinds.BlockWise1x128, kinds.BlockWise128x128)
    assert sa.shape == (a.shape[0], a.shape[1] // 128)
    assert sa.stride() == (1, len(sa))
    assert len(sa) % 4 == 0
    groups = -(-a.shape[1] // 128)
    assert sb.shape == (groups + -groups % 4, b.shape[1] // 128)
    assert sb.stride(0) == 1
    assert b.stride(0) == 1
    wide_a = a.to(torch.float32) * sa.repeat_interleave(128, 1)
    wide_b = b.to(torch.float32) * sb[:groups].repeat_interleave(128, 0).repeat_interleave(128, 1)
    return (wide_a @ wide_b).to(output_dtype)


def _grouped(
    a: Tensor, b: Tensor, sa: Tensor, kind_a: Any, sb: Tensor, kind_b: Any, *, offs: Tensor, output_dtype: Any
) -> Tensor:
    """torch's grouped product with one scale a row, in plain torch."""
    assert kind_a is kind_b is functional.ScalingType.RowWise
    assert sa.shape == a.shape[:1]
    assert sb.shape == (b.shape[0], b.shape[2])
    assert b.stride(-2) == 1
    y = torch.full((a.shape[0], b.shape[2]), float("nan"), dtype=output_dtype)
    start = 0
    for expert, end in enumerate(offs.tolist()):
        part = (a[start:end].to(torch.float32) * sa[start:end, None]) @ (b[expert].to(torch.float32) * sb[expert])
        y[start:end], start = part.to(output_dtype), end
    assert start == len(a)
    return y


@pytest.mark.parametrize("shared", [Format.FP8_128x128, Format.FP8_32x32])
def test_the_fp8_layer_matches_the_oracle(shared: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(functional, "scaled_grouped_mm"):
        pytest.skip(f"torch {torch.__version__} has no scaled_grouped_mm")
    monkeypatch.setattr(functional, "scaled_mm", _scaled_mm)
    monkeypatch.setattr(functional, "scaled_grouped_mm", _grouped)
    spec, weights = support.layer(shared=shared)
    peer = torch_grouped.TorchFp8()
    run = base.step(peer.prepare(spec, *weights, (1, 9)), "serial", CPU)
    for tokens in (1, 9):
        batch = support.batch(spec, tokens)
        assert base.check(peer, run(batch), batch, spec, *weights) < peer.tolerance


def test_the_fp8_peer_refuses_a_cpu_and_plain_layers() -> None:
    spec, _ = support.layer(Format.BF16, Format.BF16)
    reasons = "; ".join(PEERS["torch-fp8"].refusals(spec, CPU))
    assert "needs a Hopper GPU" in reasons
    assert "--peers torch-bf16" in reasons
