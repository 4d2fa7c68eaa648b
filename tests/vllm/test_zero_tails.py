"""The zeros that vLLM puts behind a rank's part of a block-FP8 shared expert are not kept."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.formats import Format
from foldmoe.integrations.vllm import plugin
from foldmoe.integrations.vllm.shared import without_zero_tail
from foldmoe.layer import FoldedMoE
from foldmoe.moe import ExpertSpec
from foldmoe.planner import FusionPolicy
from foldmoe.reference import reference_moe
from tests.support.cases import assert_close, make_experts, make_layer

if TYPE_CHECKING:
    from foldmoe.moe import ExpertWeights

RANKS, EXPERTS, TOP_K, WIDTH, HIDDEN, TOKENS = 4, 8, 2, 128, 128, 19


@pytest.mark.parametrize("e8m0", [False, True], ids=["f32", "e8m0"])
@pytest.mark.parametrize(("format", "width", "padded"), [
    (Format.FP8_128x128, 128, 256), (Format.FP8_128x128, 256, 768), (Format.FP8_32x32, 64, 160),
])  # fmt: skip
def test_whole_blocks_of_zeros_are_cut_and_the_result_keeps_every_bit(
    format: Format, width: int, padded: int, e8m0: bool
) -> None:
    routed, shared = make_layer(Format.FP8_128x128, format, EXPERTS, WIDTH, width, HIDDEN, e8m0_scales=e8m0)
    wide = shared.padded(padded)
    found = without_zero_tail(wide)
    assert found.width == width
    assert found.nbytes == shared.nbytes < wide.nbytes
    for part in (found.gate_up, found.down):
        assert part.values.is_contiguous()
        assert part.values.untyped_storage().nbytes() == part.values.nbytes, "the zeros are not held"
    assert torch.equal(found.gate_up.dequantize(), shared.gate_up.dequantize())
    assert torch.equal(found.down.dequantize(), shared.down.dequantize())
    x, ids = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.randint(0, EXPERTS, (TOKENS, TOP_K))
    weights = torch.rand(TOKENS, TOP_K)
    kept, cut = (FoldedMoE(routed, part)(x, ids, weights) for part in (wide, found))
    assert torch.equal(kept, cut)


def test_only_blocks_that_are_zero_in_all_three_matrices_are_cut() -> None:
    """A shared expert that is switched off by one matrix stays, and so does a zero block that is not the last."""
    wide = make_experts(Format.FP8_128x128, 1, 128, HIDDEN).padded(384)
    for part, index in (("gate_up", (0, 383, 0)), ("gate_up", (0, 767, 5)), ("down", (0, 3, 383))):
        tensor = getattr(wide, part)
        values = tensor.values.clone()
        values.view(torch.uint8)[index] = 1
        touched = replace(wide, **{part: replace(tensor, values=values)})
        assert without_zero_tail(touched) is touched
    nothing = make_experts(Format.FP8_128x128, 1, 384, HIDDEN)
    for tensor in (nothing.gate_up, nothing.down):
        tensor.values.view(torch.uint8).zero_()
    assert without_zero_tail(nothing).width == 128, "one block is kept"
    for other in (make_experts(Format.BF16, 1, 64, HIDDEN).padded(128), make_experts(Format.FP8_32x32, 1, 48, HIDDEN)):
        assert without_zero_tail(other) is other


def test_each_rank_of_a_vllm_layer_holds_its_true_part(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own MLP and padding: 5 blocks over 4 ranks are 2, 2, 1 and none; the parts are the reference's."""
    from vllm.distributed import get_tp_group

    from tests.vllm.factory import build, call, routes

    routed, shared = make_layer(Format.MXFP4, Format.FP8_128x128, EXPERTS, WIDTH, 5 * 128, HIDDEN, e8m0_scales=True)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    logits = torch.randn(TOKENS, EXPERTS, dtype=torch.bfloat16)
    ids, weights = routes(logits)
    summed: list[torch.Tensor] = []
    monkeypatch.setattr(get_tp_group(), "world_size", RANKS)
    monkeypatch.setattr(get_tp_group(), "all_reduce", lambda y: summed.append(y) or y)
    plans = []
    for rank, blocks in enumerate((2, 2, 1, 0)):
        monkeypatch.setattr(get_tp_group(), "rank_in_group", rank)
        mlp = _loaded_mlp(engine, shared, monkeypatch)
        assert mlp.down_proj.weight.shape == (HIDDEN, 256), "vLLM rounds every rank up to two blocks"
        runner = build(routed, mlp, f"tails.{rank}")
        true = _columns(shared, 256 * rank, 128 * blocks) if blocks else None
        expected = reference_moe(x, ids, weights, routed.shard(rank, RANKS), true, activations="fp8")
        assert_close(call(engine, runner, x, logits), expected, 6e-3)
        plans.append(plugin.record().entries[-1].plan)
    assert len(summed) == RANKS, "one all-reduce a rank sums both parts"
    block = ExpertSpec(1, 128, Format.FP8_128x128, e8m0_scales=True).nbytes(HIDDEN)
    assert [plan.extra_bytes for plan in plans] == [0, 0, -block, -block]
    decisions = [{**plan.decision(), "layer": ""} for plan in plans]
    assert decisions == decisions[:1] * RANKS, "ranks agree although they hold different widths"


def test_a_slot_keeps_its_width_and_counts_the_zeros(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks hold experts of their own, their parts of one shared expert in a slot each: 2, 2, 1 and no blocks."""
    from vllm.distributed import get_tp_group

    from tests.vllm.factory import build

    width = 2 * 128
    routed, shared = make_layer(Format.FP8_128x128, Format.FP8_128x128, EXPERTS, width, 5 * 128, HIDDEN)
    x, ids = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.randint(0, EXPERTS, (TOKENS, TOP_K))
    weights = torch.rand(TOKENS, TOP_K)
    monkeypatch.setattr(plugin.record(), "policy", FusionPolicy("slot"))
    monkeypatch.setattr(get_tp_group(), "world_size", RANKS)
    block = ExpertSpec(1, 128, Format.FP8_128x128).nbytes(HIDDEN)
    for rank, blocks in enumerate((2, 2, 1, 0)):
        monkeypatch.setattr(get_tp_group(), "rank_in_group", rank)
        mlp = _loaded_mlp(engine, shared, monkeypatch, e8m0=False)
        monkeypatch.setattr(get_tp_group(), "rank_in_group", 0)
        monkeypatch.setattr(get_tp_group(), "world_size", 1)
        build(routed, mlp, f"slots.{rank}")
        monkeypatch.setattr(get_tp_group(), "world_size", RANKS)
        entry = plugin.record().entries[-1]
        assert entry.plan is not None
        assert entry.moe is not None
        assert entry.plan.strategy == "slot"
        assert entry.slot_zeros == (2 - blocks) * block
        assert entry.moe.unpack()[1].width == width
        true = _columns(shared, 256 * rank, 128 * blocks) if blocks else None
        expected = reference_moe(x, ids, weights, routed, true, activations="fp8")
        assert_close(entry.moe(x, ids, weights), expected, 6e-3)


def _columns(shared: ExpertWeights, start: int, width: int) -> ExpertWeights:
    """Part of the width, cut between blocks."""
    from foldmoe.formats.cutting import cut

    gate, up = (cut(half, -2, start, width) for half in shared.gate_and_up())
    return type(shared).from_parts(gate, up, cut(shared.down, -1, start, width))


def _loaded_mlp(engine: Any, shared: ExpertWeights, monkeypatch: pytest.MonkeyPatch, e8m0: bool = True) -> Any:
    """vLLM's MLP of DeepSeek-V4 on a GPU, this rank's part loaded by vLLM's own loaders."""
    from vllm.model_executor.layers.quantization import fp8
    from vllm.models.deepseek_v4.nvidia.model import DeepseekV4MLP, DeepseekV4Model
    from vllm.models.deepseek_v4.quant_config import DeepseekV4FP8Config

    config = DeepseekV4FP8Config(True, "dynamic", None, [128, 128])
    config._resolved_expert_dtype = "fp4" if e8m0 else "fp8"  # which decides how vLLM keeps the scales
    with monkeypatch.context() as patch:
        patch.setattr(fp8, "init_fp8_linear_kernel", lambda **_: None)  # a CPU without AMX has none
        patch.setattr(engine, "model_config", SimpleNamespace(dtype=torch.bfloat16))
        mlp = DeepseekV4MLP(HIDDEN, shared.width, "silu", None, config, reduce_results=False, prefix="shared_experts")
    # A method of the model, later a static one; the quantisation config is all that it looks at.
    pad = partial(DeepseekV4Model._pad_shared_expert_weight, config)
    if not isinstance(vars(DeepseekV4Model)["_pad_shared_expert_weight"], staticmethod):
        pad = partial(DeepseekV4Model._pad_shared_expert_weight, SimpleNamespace(quant_config=config))
    gate, up = shared.gate_and_up()
    for name, number, tensor in (("gate_up_proj", 0, gate), ("gate_up_proj", 1, up), ("down_proj", None, shared.down)):
        linear = getattr(mlp, name)
        for end, stored in (("weight", tensor.values), ("weight_scale_inv", tensor.scales)):
            parameter = getattr(linear, end)
            padded = pad(f".shared_experts.{name}.{end}", stored[0])
            parameter.weight_loader(parameter, padded.view(parameter.dtype), *([] if number is None else [number]))
    return mlp
