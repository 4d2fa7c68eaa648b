"""Cases of section 3: layout, shapes, sizes. Each row's number is in the test's name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import ExpertSpec, ExpertWeights, LayerSpec, Placement
from foldmoe.planner import FusionPolicy, plan_layer
from foldmoe.reference import reference_moe
from tests.support.cases import (
    BF16_TOLERANCE,
    FLOAT32_TOLERANCE,
    ODD_WIDTHS,
    assert_close,
    get_case,
    make_experts,
    make_layer,
    random_case,
)
from tests.support.layers import FOLDS, HIDDEN, WIDTH, fold_layer, ones, plain
from tests.support.strategies import FP8_FORMATS

if TYPE_CHECKING:
    from foldmoe.planner.policy import Fold


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def asymmetric(order: str) -> ExpertWeights:
    """gate(ones) = 1, up(ones) = 2, stored in ``order``; down averages over I."""
    one, two = torch.full((1, WIDTH, HIDDEN), 1 / HIDDEN), torch.full((1, WIDTH, HIDDEN), 2 / HIDDEN)
    stacked = torch.cat((one, two) if order == "gate_up" else (two, one), dim=1)
    down = plain(torch.full((1, HIDDEN, WIDTH), 1 / WIDTH))
    return ExpertWeights.from_stacked(plain(stacked), down, order=order)  # type: ignore[arg-type]


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("order", ["gate_up", "up_gate"])
def test_case_46_gate_and_up_are_told_apart_by_the_stated_order(fold: Fold, order: str) -> None:
    assert abs(silu(1) * 2 - silu(2) * 1) > 0.2
    experts = asymmetric(order)
    y = fold_layer(experts, experts, fold)(ones(1), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    assert_close(y, torch.full((1, HIDDEN), 2 * silu(1) * 2), FLOAT32_TOLERANCE)


def random_bytes_mxfp4(rows: int, columns: int) -> QuantizedTensor:
    """Codes of every kind, scales around 1 / sqrt(columns): made without quantising, for large shapes."""
    centre = 127 - round(math.log2(columns) / 2) - 1
    return QuantizedTensor(
        torch.randint(0, 256, (1, rows, columns // 2), dtype=torch.uint8),
        torch.randint(centre - 1, centre + 2, (1, rows, columns // 32), dtype=torch.uint8),
        format=Format.MXFP4,
    )


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize(("hidden", "width"), [(2880, 96), (96, 2880)])
def test_case_49_gpt_oss_like_sizes_that_are_no_multiple_of_128(fold: Fold, hidden: int, width: int) -> None:
    experts = ExpertWeights(random_bytes_mxfp4(2 * width, hidden), random_bytes_mxfp4(hidden, width))
    case = random_case(3, 1, 1, hidden)
    y = fold_layer(experts, experts, fold)(*case.args)
    assert_close(y, reference_moe(*case.args, experts, experts), BF16_TOLERANCE)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("width", ODD_WIDTHS)
@pytest.mark.parametrize("format", Format)
def test_case_50_any_width_works_without_padding(fold: Fold, width: int, format: Format) -> None:
    routed, shared = make_layer(format, format, 3, width, width, 64)
    case = random_case(3, 2, 3, 64, dtype=torch.float32)
    layer = fold_layer(routed, shared, fold)
    assert layer.plan.padded_width is None
    assert_close(layer(*case.args), reference_moe(*case.args, routed, shared), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("fold", ["native", "off"])
@pytest.mark.parametrize("shared_format", [Format.MXFP4, *FP8_FORMATS])
def test_case_50_tensor_parallel_shards_that_cut_a_scale_block_add_up(fold: Fold, shared_format: Format) -> None:
    """Widths 192 and 320 a rank, as 3072 / 16 and 1280 / 4 give."""
    hidden, size = 64, 2
    routed, shared = make_layer(Format.FP8_128x128, shared_format, 2, 192 * size, 320 * size, hidden)
    case = random_case(3, 2, 2, hidden, dtype=torch.float32)
    total = torch.zeros(3, hidden)
    for rank in range(size):
        place = Placement(tp_size=size, tp_rank=rank)
        layer = fold_layer(routed.shard(rank, size), shared.shard(rank, size), fold, placement=place)
        assert (layer.plan.spec.routed.width, layer.plan.spec.shared.width) == (384, 640)
        total += layer(*case.args)
    assert_close(total, reference_moe(*case.args, routed, shared), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("width", [128, 96])
def test_case_50_a_narrower_shared_expert_takes_a_padded_slot(width: int) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 3, 192, width, 64)
    case = random_case(3, 2, 3, 64, dtype=torch.float32)
    layer = fold_layer(routed, shared, "slot")
    assert layer.plan.padded_width == 192
    assert_close(layer(*case.args), reference_moe(*case.args, routed, shared), FLOAT32_TOLERANCE)


@pytest.mark.parametrize("format", [Format.MXFP4, Format.FP8_32x32])
def test_case_50_a_narrower_shared_expert_takes_a_padded_slot_on_every_tensor_parallel_rank(format: Format) -> None:
    routed, shared = make_layer(format, format, 3, 384, 192, 64)
    case = random_case(3, 2, 3, 64, dtype=torch.float32)
    total = torch.zeros(3, 64)
    for rank in range(2):
        place = Placement(tp_size=2, tp_rank=rank)
        layer = fold_layer(routed.shard(rank, 2), shared.shard(rank, 2), "slot", placement=place)
        assert layer.plan.padded_width == 192
        total += layer(*case.args)
    assert_close(total, reference_moe(*case.args, routed, shared), FLOAT32_TOLERANCE)


def test_case_52_a_shared_expert_that_fits_no_slot_is_found_at_plan_time() -> None:
    spec = LayerSpec(
        "layers.3",
        6144,
        8,
        ExpertSpec(256, 3072, Format.NVFP4),
        ExpertSpec(1, 6144, Format.BF16),
    )
    plan = plan_layer(spec, FusionPolicy("slot", backend="torch"), "cpu")
    assert plan.strategy == "serial"
    text = "; ".join(plan.reasons)
    assert "the shared expert is 6144 wide, a routed slot 3072" in text
    assert "requantising bf16 -> nvfp4 is not supported" in text
    assert plan_layer(spec, FusionPolicy(backend="torch"), "cpu").strategy == "native"


def test_case_52_different_hidden_sizes_are_refused_by_name() -> None:
    routed, shared = make_experts(Format.MXFP4, 2, 64, 128), make_experts(Format.BF16, 1, 64, 64)
    with pytest.raises(ValueError, match=r"^layers\.3: routed experts have hidden size 128, the shared expert 64"):
        fold_layer(routed, shared, "native", name="layers.3")


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("tokens", [65, 129])
def test_case_54_more_tokens_on_one_expert_than_a_block_holds(fold: Fold, tokens: int) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 3, 64, 64, 64)
    case = get_case("all_on_one_expert", tokens, 2, 3, 64)
    y = fold_layer(routed, shared, fold, activations="fp8")(*case.args)
    expected = reference_moe(*case.args, routed, shared, activations="fp8")
    for start in range(0, tokens, 64):
        assert_close(y[start : start + 64], expected[start : start + 64], 6e-3)


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("activations", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("top_k", [0, 2])
def test_case_55_no_tokens_give_an_empty_result(fold: Fold, activations: str, dtype: torch.dtype, top_k: int) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 3, 64, 64, 64)
    case = random_case(0, top_k, 3, 64, dtype=dtype)
    y = fold_layer(routed, shared, fold, activations=activations)(*case.args)  # type: ignore[arg-type]
    assert (y.shape, y.dtype) == ((0, 64), dtype)


@pytest.mark.parametrize("fold", FOLDS)
def test_case_55_no_valid_tokens_give_zeros(fold: Fold) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, 3, 64, 64, 64)
    case = random_case(4, 2, 3, 64)
    assert (fold_layer(routed, shared, fold)(*case.args, num_valid_tokens=0) == 0).all()


def test_case_56_bytes_are_counted_beyond_2_to_the_31() -> None:
    spec = ExpertSpec(56_000, 8, Format.BF16)
    assert spec.count * spec.nbytes(7168) == 56_000 * 8 * 7168 * 3 * 2 > 2**31
    stored = QuantizedTensor(
        torch.empty(384, 6144, 3584, dtype=torch.uint8, device="meta"),
        torch.empty(384, 6144, 224, dtype=torch.uint8, device="meta"),
        format=Format.MXFP4,
    )
    assert stored.nbytes == 384 * 6144 * (3584 + 224)
    assert stored[383].values.storage_offset() == 383 * 6144 * 3584 > 2**31


def behind_untouched_memory(tensor: QuantizedTensor, experts: int) -> QuantizedTensor:
    """One expert as the last of a stack whose other pages are never written, so that no memory backs them."""

    def place_last(t: torch.Tensor) -> torch.Tensor:
        stack = torch.empty(experts, *t.shape[1:], dtype=torch.uint8)
        stack[-1] = t[0].view(torch.uint8)
        return stack.view(t.dtype)

    return tensor.map(place_last)


def test_case_56_an_expert_that_lies_beyond_2_to_the_31_bytes_is_read_right() -> None:
    experts, hidden = 2200, 1024
    last = make_experts(Format.MXFP4, 1, 1024, hidden)
    routed = ExpertWeights(*(behind_untouched_memory(t, experts) for t in (last.gate_up, last.down)))
    assert routed.gate_up.values.numel() > 2**31
    case = random_case(2, 1, 1, hidden, id_dtype=torch.int32)
    y = fold_layer(routed, None, "off")(case.x, case.topk_ids + (experts - 1), case.topk_weights)
    assert_close(y, reference_moe(*case.args, last), BF16_TOLERANCE)


def test_case_59_routes_times_width_beyond_2_to_the_31_are_counted_in_64_bits() -> None:
    rows, width = 524_288, 4096
    stored = QuantizedTensor(torch.empty(rows, width, dtype=torch.bfloat16, device="meta"), format=Format.BF16)
    assert stored.values.numel() == 2**31
    assert stored.nbytes == 2**32
