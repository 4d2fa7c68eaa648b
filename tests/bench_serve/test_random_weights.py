"""Weights for a checkpoint that is only a configuration."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foldmoe.bench.serve import random_weights
from foldmoe.formats import Format, QuantizedTensor

HIDDEN, WIDTH, EXPERTS = 256, 128, 32


class Stored(nn.Module):
    """Parameters as vLLM's models have them before anything is repacked."""

    def __init__(self) -> None:
        super().__init__()
        for name, dtype, *shape in (
            ("w13_weight", torch.uint8, EXPERTS, 2 * WIDTH, HIDDEN // 2),
            ("w13_weight_scale", torch.uint8, EXPERTS, 2 * WIDTH, HIDDEN // 32),
            ("gate_weight", torch.bfloat16, EXPERTS, HIDDEN),
            ("e_score_correction_bias", torch.float32, EXPERTS),
            ("tid2eid", torch.int32, 64, 6),
            ("shared_weight", torch.float8_e4m3fn, WIDTH, HIDDEN),
            ("shared_weight_scale_inv", torch.float8_e8m0fnu, 1, 2),
            ("ffn_norm", torch.bfloat16, HIDDEN),
            ("hc_attn_scale", torch.float32, 3),
        ):
            empty = torch.full(shape, 77, dtype=torch.uint8) if dtype.itemsize == 1 else torch.full(shape, 7.0)
            value = empty.view(dtype) if dtype.itemsize == 1 else empty.to(dtype)
            self.register_parameter(name, nn.Parameter(value, requires_grad=False))


@pytest.fixture
def model() -> Stored:
    model = Stored()
    random_weights.fill(model)
    return model


def test_every_stored_code_is_drawn_and_none_is_a_nan(model: Stored) -> None:
    assert model.w13_weight.unique().numel() == 256
    shared = model.shared_weight.float()
    assert shared.isfinite().all()
    assert model.shared_weight.view(torch.uint8).unique().numel() == 254  # all but the two NaNs


def test_weights_keep_an_inputs_magnitude_at_the_widths_of_real_models() -> None:
    codes = torch.randint(0, 256, (1, 8, 2048), dtype=torch.uint8)
    scales = torch.full((1, 8, 128), random_weights._MXFP4_SCALE, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weights = QuantizedTensor(codes, scales, format=Format.MXFP4).dequantize()
    assert 0.5 < 64 * weights.std().item() < 2  # rows of 4096: 1/64 would keep it exactly


def test_scores_decide_where_tokens_go_and_all_experts_get_some(model: Stored) -> None:
    x = torch.randn(512, HIDDEN)
    scores = x @ model.gate_weight.float().T + model.e_score_correction_bias
    counts = scores.topk(4).indices.flatten().bincount(minlength=EXPERTS)
    assert counts.min() > 0
    assert counts.max() < 4 * counts.float().mean()


def test_tables_of_expert_ids_stay_and_norms_are_one(model: Stored) -> None:
    assert (model.tid2eid == 7).all()
    assert (model.ffn_norm == 1).all()
    assert (model.hc_attn_scale == 0).all()


def test_a_parameters_numbers_depend_on_its_name_and_the_seed_alone(model: Stored) -> None:
    again, other = Stored(), Stored()
    random_weights.fill(again)
    random_weights.fill(other, seed=1)
    assert torch.equal(again.gate_weight, model.gate_weight)
    assert not torch.equal(other.gate_weight, model.gate_weight)


def test_vllm_knows_the_load_format() -> None:
    loaders = pytest.importorskip("vllm.model_executor.model_loader", reason="vLLM is not installed here")
    random_weights.register()
    assert random_weights.LOAD_FORMAT in loaders._LOAD_FORMAT_TO_MODEL_LOADER
