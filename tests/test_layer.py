"""The front door: what it checks, how it carries the plan out, what it says of itself."""

from __future__ import annotations

import copy
import gc
import io
from typing import TYPE_CHECKING

import pytest
import torch

from foldmoe import Activation, ExpertWeights, FoldedMoE, Format, FusionPolicy, Placement, plan_layer, reference_moe
from foldmoe.moe import ExpertSpec, LayerSpec
from foldmoe.reference import relative_error
from tests.support.cases import FLOAT32_TOLERANCE, assert_close, make_experts, make_layer, random_case

if TYPE_CHECKING:
    from foldmoe.backends import Call

E, K, H = 6, 3, 128


@pytest.fixture
def weights() -> tuple[ExpertWeights, ExpertWeights]:
    return make_layer(Format.MXFP4, Format.FP8_128x128, experts=E, width=64, shared_width=64, hidden=H)


@pytest.fixture
def layer(weights: tuple[ExpertWeights, ExpertWeights]) -> FoldedMoE:
    return FoldedMoE(*weights, name="layers.7.ffn", top_k=K)


def call(layer: FoldedMoE, **changes: object) -> torch.Tensor:
    case = random_case(5, K, E, H)
    arguments = {"x": case.x, "topk_ids": case.topk_ids, "topk_weights": case.topk_weights} | changes
    return layer(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"x": torch.zeros(5, H, dtype=torch.int64)}, TypeError, "x must be bfloat16"),
        ({"x": torch.zeros(5, H + 1)}, ValueError, r"x must be \[M, 128\]"),
        ({"topk_ids": torch.zeros(5, K)}, TypeError, "topk_ids must be int32 or int64"),
        ({"topk_ids": torch.zeros(4, K, dtype=torch.int64)}, ValueError, "must both be"),
        ({"shared_weights": torch.zeros(4)}, ValueError, r"shared_weights must be \[5\]"),
        ({"topk_ids": torch.full((5, K), E)}, ValueError, "ids must lie in -1 .. 5, found 6 .. 6"),
        ({"topk_ids": torch.full((5, K), -2)}, ValueError, "ids must lie in -1 .. 5, found -2 .. -2"),
        (
            {"topk_ids": torch.zeros(5, K, dtype=torch.int64, device="meta")},
            ValueError,
            "topk_ids is on meta, the layer on cpu",
        ),
        (
            {"topk_weights": torch.ones(5, K, dtype=torch.bool)},
            TypeError,
            "topk_weights must be float32, found torch.bool",
        ),
        ({"num_valid_tokens": -1}, ValueError, "num_valid_tokens must be 0 or more, found -1"),
        ({"num_valid_tokens": torch.tensor(-1)}, ValueError, "num_valid_tokens must be 0 or more, found -1"),
        ({"num_valid_tokens": 2.5}, ValueError, "num_valid_tokens must be 0 or more, found 2.5"),
        ({"shared_rows": 3}, ValueError, r"shared_rows must be \(start, end\), found 3"),
        ({"shared_rows": (0, 1, 2)}, ValueError, r"shared_rows must be \(start, end\), found \(0, 1, 2\)"),
        ({"num_valid_tokens": torch.tensor([1, 2])}, ValueError, r"num_valid_tokens must be 1 .* found \[2\]"),
        ({"shared_rows": torch.tensor([1])}, ValueError, r"shared_rows must be 2 .* found \[1\]"),
        ({"shared_rows": torch.tensor([0.0, 1.0])}, ValueError, "shared_rows must be 2 .* found .* torch.float32"),
    ],
)
def test_bad_calls_are_refused_by_layer_and_argument(
    layer: FoldedMoE, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        call(layer, **changes)
    assert "layers.7.ffn" in str(raised.value)


def test_more_ids_than_experts_are_refused(weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    with pytest.raises(ValueError, match="7 ids a token but only 6 routed experts"):
        call(FoldedMoE(*weights), topk_ids=torch.zeros(5, 7, dtype=torch.int64), topk_weights=torch.zeros(5, 7))


def test_two_shared_experts_are_refused(weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    with pytest.raises(ValueError, match="expected one shared expert, found 6"):
        FoldedMoE(weights[0], weights[0])


def test_a_stock_plan_builds_no_layer(weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    with pytest.raises(ValueError, match="stay with the engine's own layer"):
        FoldedMoE(*weights, policy=FusionPolicy("stock"))


def test_device_tensors_say_what_ints_say(layer: FoldedMoE) -> None:
    ints = call(layer, num_valid_tokens=4, shared_rows=(1, 3))
    tensors = call(
        layer,
        num_valid_tokens=torch.tensor([4], dtype=torch.int32),
        shared_rows=torch.tensor([1, 3], dtype=torch.int32),
    )
    assert torch.equal(ints, tensors)


def test_padding_alone_may_hold_any_ids(layer: FoldedMoE) -> None:
    strays = torch.full((5, K), E)
    assert not call(layer, topk_ids=strays, num_valid_tokens=0).any()


@pytest.mark.parametrize("compiled", [False, True])
def test_backends_get_row_bounds_from_the_host_as_numbers(
    layer: FoldedMoE, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel cannot read a tensor of the host's, which is what bounds become inside a compiled graph."""
    got: list[Call] = []
    forward = layer.packed.forward
    monkeypatch.setattr(layer.packed, "forward", lambda call, **how: got.append(call) or forward(call, **how))
    case = random_case(5, K, E, H)

    def model(x: torch.Tensor) -> torch.Tensor:
        return layer(x, case.topk_ids, case.topk_weights, num_valid_tokens=4, shared_rows=(1, 3))

    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    assert torch.equal(run(case.x), call(layer, num_valid_tokens=4, shared_rows=(1, 3)))
    assert [(one.num_valid_tokens, one.shared_rows) for one in got] == [(4, (1, 3))] * 2


@pytest.mark.parametrize("fold", ["native", "slot"])
def test_shared_rows_and_padding_hold_in_every_strategy(fold: str) -> None:
    routed, shared = make_layer(Format.MXFP4, Format.MXFP4, experts=E, width=64, shared_width=64, hidden=H)
    layer = FoldedMoE(routed, shared, policy=FusionPolicy(fold, activations="bf16"))  # type: ignore[arg-type]
    assert layer.plan.strategy == fold
    case = random_case(9, K, E, H, dtype=torch.float32)
    options = {"num_valid_tokens": 7, "shared_rows": (2, 8), "routed_scale": 2.5, "shared_weights": torch.rand(9)}
    truth = reference_moe(*case.args, routed, shared, **options)  # type: ignore[arg-type]
    assert_close(layer(*case.args, **options), truth, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_share_the_experts_add_up(weights: tuple[ExpertWeights, ExpertWeights], ranks: int) -> None:
    routed, shared = weights
    case = random_case(8, K, E, H, dtype=torch.float32)
    total = torch.zeros_like(case.x)
    for rank in range(ranks):
        place = Placement(ep_size=ranks, ep_rank=rank)
        held = place.experts(E)
        part = FoldedMoE(
            routed[held.start : held.stop],
            shared,
            placement=place,
            num_experts=E,
            policy=FusionPolicy(activations="bf16"),
        )
        mine = (8 * rank // ranks, 8 * (rank + 1) // ranks)  # each rank adds the shared part of its own tokens
        total += part(*case.args, shared_rows=mine)
    assert_close(total, reference_moe(*case.args, routed, shared), FLOAT32_TOLERANCE)


def test_a_rank_that_holds_other_experts_than_planned_is_refused(
    weights: tuple[ExpertWeights, ExpertWeights],
) -> None:
    with pytest.raises(ValueError, match="rank holds 6 experts, its placement says 3"):
        FoldedMoE(*weights, placement=Placement(2, 0), num_experts=E)


def test_compile_sees_one_op(layer: FoldedMoE) -> None:
    case = random_case(5, K, E, H)

    def model(x: torch.Tensor) -> torch.Tensor:
        return layer(x * 2, case.topk_ids, case.topk_weights) + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(case.x), model(case.x))


def test_compile_knows_that_the_output_is_contiguous(layer: FoldedMoE) -> None:
    case = random_case(5, K, E, H)
    x = case.x.t().contiguous().t()  # columns side by side
    arguments = (x, case.topk_ids, case.topk_weights, None, 1.0, None, None, layer._handle)
    torch.library.opcheck(torch.ops.foldmoe.moe.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_copy_runs_its_own_weights_when_compiled(layer: FoldedMoE, how: str) -> None:
    if how == "deepcopy":
        other = copy.deepcopy(layer)
    else:
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    for weights in (other.packed.routed, other.packed.shared):  # type: ignore[attr-defined]
        weights.down.values.zero_()
    case, kept = random_case(5, K, E, H), call(layer)

    def model(x: torch.Tensor) -> torch.Tensor:
        return other(x, case.topk_ids, case.topk_weights)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert not compiled(case.x).any()
    assert torch.equal(call(layer), kept)
    del layer
    gc.collect()
    assert not compiled(case.x).any()


def test_the_layer_says_what_it_is(layer: FoldedMoE, weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    assert layer.stats() == {
        "layer": "layers.7.ffn",
        "arm": "native",
        "backend": "torch",
        "fold_rows": ((0, None),),
        "ids_out_of_range": 0,
    }
    assert "layers.7.ffn: native on torch" in repr(layer)
    assert layer.memory()["weights"] == sum(part.nbytes for part in weights)


def test_requantising_costs_what_it_is_said_to(weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    case = random_case(16, K, E, H)
    native, slot = (
        FoldedMoE(*weights, policy=FusionPolicy(fold, allow_requantize=True))(*case.args)  # type: ignore[arg-type]
        for fold in ("native", "slot")
    )
    assert 0.02 < relative_error(slot, native.double()) < 0.2


def test_plans_are_followed_outside_the_rows_that_fold(weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    from dataclasses import replace

    spec = LayerSpec("layer", H, K, ExpertSpec.of(weights[0]), ExpertSpec.of(weights[1]))
    plan = replace(plan_layer(spec, device="cpu"), fold_rows=((0, 4),))
    layer = FoldedMoE(*weights, plan=plan)
    seen = []
    plain = layer.packed.forward
    object.__setattr__(layer.packed, "forward", lambda c, *, folded: (seen.append(folded), plain(c, folded=folded))[1])
    for tokens in (3, 4):
        layer(*random_case(tokens, K, E, H).args)
    assert seen == [True, False]


@pytest.mark.parametrize("format", [Format.MXFP4, Format.FP8_128x128, Format.BF16])
def test_a_padded_slot_unpacks_to_the_stored_bytes(format: Format) -> None:
    routed, shared = make_layer(format, format, experts=3, width=256, shared_width=128, hidden=H)
    layer = FoldedMoE(routed, shared, policy=FusionPolicy("slot"))
    assert layer.plan.padded_width == 256
    for mine, stored in zip(layer.unpack(), (routed, shared), strict=True):
        assert mine is not None
        for one, other in ((mine.gate_up, stored.gate_up), (mine.down, stored.down)):
            for role, tensor in one.tensors().items():
                found, wanted = (t.contiguous().view(torch.uint8) for t in (tensor, other.tensors()[role]))
                assert torch.equal(found, wanted)


def test_a_plan_of_another_layer_is_refused(weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    plan = FoldedMoE(*weights).plan
    other = make_layer(Format.MXFP4, Format.FP8_128x128, experts=E, width=96, shared_width=64, hidden=H)
    with pytest.raises(ValueError, match=r"planned for .* width 64, mxfp4; found hidden size 128, width 96, mxfp4"):
        FoldedMoE(*other, plan=plan)


def test_a_plan_says_the_activation_and_the_shared_expert(weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    clamped = Activation(0.02)  # low, so that it matters
    told = FoldedMoE(*weights, activation=clamped)
    plan = told.plan
    assert torch.equal(call(FoldedMoE(*weights, plan=plan)), call(told))
    assert not torch.equal(call(told), call(FoldedMoE(*weights)))
    with pytest.raises(ValueError, match=r"planned for the routed experts' Activation\(limit=0.02.*found Activation"):
        FoldedMoE(*weights, plan=plan, activation=Activation())
    with pytest.raises(ValueError, match="planned with a shared expert, found none"):
        FoldedMoE(weights[0], plan=plan)
    with pytest.raises(ValueError, match="planned without a shared expert, found one"):
        FoldedMoE(*weights, plan=FoldedMoE(weights[0]).plan)
    for shared in (make_experts(Format.BF16, 1, 64, H), make_experts(Format.FP8_128x128, 1, 128, H)):
        with pytest.raises(ValueError, match="planned for a shared expert of width 64, fp8_128x128; found"):
            FoldedMoE(weights[0], shared, plan=plan)


def test_activations_stay_bf16_beside_a_bf16_shared_expert() -> None:
    """As for a checkpoint of the same layer: FP8 activations would lower the shared expert's precision unasked."""
    mixed = make_layer(Format.MXFP4, Format.BF16, experts=E, width=64, shared_width=64, hidden=H)
    assert FoldedMoE(*mixed).plan.activations == "bf16"
    assert FoldedMoE(mixed[0]).plan.activations == "fp8"


@pytest.mark.parametrize("first", [True, False], ids=["inference mode first", "then inference mode"])
def test_calls_in_and_out_of_inference_mode_mix(weights: tuple[ExpertWeights, ExpertWeights], first: bool) -> None:
    """What a layer keeps between calls belongs to neither."""
    layer = FoldedMoE(*weights)
    x, ids, scales = random_case(5, K, E, H).args
    ids[0, 0] = -1
    for inside in (first, not first):
        with torch.inference_mode(inside):
            layer(x, ids, scales)
    assert layer.stats()["ids_out_of_range"] == 0


@pytest.mark.parametrize("given", [{"policy": FusionPolicy()}, {"placement": Placement(2, 0)}])
def test_a_plan_says_policy_and_placement_itself(
    weights: tuple[ExpertWeights, ExpertWeights], given: dict[str, object]
) -> None:
    plan = FoldedMoE(*weights).plan
    with pytest.raises(ValueError, match="the plan holds policy and placement"):
        FoldedMoE(*weights, plan=plan, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["routed", "shared"])
def test_nan_scales_are_refused_by_every_backend(weights: tuple[ExpertWeights, ExpertWeights], which: str) -> None:
    tensor = weights[which == "shared"].down
    assert tensor.scales is not None
    if tensor.e8m0_scales:
        tensor.scales.view(torch.uint8)[-1, -1, -1] = 255
    else:
        tensor.scales[-1, -1, -1] = torch.nan
    with pytest.raises(ValueError, match=rf"layers.7.ffn: 1 scales of {which} down are NaN, the first at \["):
        FoldedMoE(*weights, name="layers.7.ffn")


def test_a_plan_made_here_does_not_insist_on_a_top_k(weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    plan = FoldedMoE(*weights).plan
    assert call(FoldedMoE(*weights, plan=plan)).shape == (5, H)


def test_a_slot_is_refused_where_floats_differ() -> None:
    routed, shared = make_layer(Format.BF16, Format.BF16, experts=3, width=64, shared_width=64, hidden=H)
    wide = ExpertWeights(*(part.map(lambda t: t.float()) for part in (shared.gate_up, shared.down)))
    layer = FoldedMoE(routed, wide, policy=FusionPolicy("slot"))
    assert layer.plan.strategy == "serial"
    assert any("stored differently" in reason for reason in layer.plan.reasons)


def test_weights_that_no_header_tells_of_go_to_the_next_backend(weights: tuple[ExpertWeights, ExpertWeights]) -> None:
    from foldmoe.backends import Unsupported
    from foldmoe.backends.torch.backend import TorchBackend
    from foldmoe.planner import capability

    class Picky(TorchBackend):
        name = "picky"

        def pack(self, *_: object, **__: object) -> object:  # type: ignore[override]
            raise Unsupported("3 rows span 12 binades, at most 11 are exact")

    before = dict(capability._REGISTRY)
    capability._REGISTRY.clear()
    capability._REGISTRY.update({"picky": Picky(), **before})
    try:
        layer = FoldedMoE(*weights)
    finally:
        capability._REGISTRY.clear()
        capability._REGISTRY.update(before)
    assert layer.plan.backend == "torch"
    assert "picky: 3 rows span 12 binades, at most 11 are exact" in layer.plan.reasons
    assert call(layer).shape == (5, H)
