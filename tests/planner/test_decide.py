"""One layer's decision: the best strategy that keeps the stored precision, and a reason for everything refused."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

import pytest

import foldmoe.backends  # noqa: F401  registers the torch backend
from foldmoe import Activation, Format, FusionPolicy, Placement, plan_layer
from foldmoe.moe import ExpertSpec, LayerSpec
from foldmoe.planner import capability
from foldmoe.planner.decide import without_backend
from foldmoe.planner.devices import KNOWN

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foldmoe.moe.spec import ActivationPrecision
    from foldmoe.planner.devices import Device
    from foldmoe.planner.policy import Fold

MXFP4 = ExpertSpec(6, 192, Format.MXFP4)
FP8 = ExpertSpec(1, 192, Format.FP8_128x128, e8m0_scales=True)
SPEC = LayerSpec("layers.0.ffn", 256, 2, MXFP4, FP8, activations="fp8")


class Fake:
    """A backend whose answers a test sets."""

    name: ClassVar[str] = "fake"
    deterministic: ClassVar[bool] = True
    missing: str | None = None
    against: tuple[str, ...] = ()
    rows: tuple[tuple[int, int | None], ...] = ((0, 17), (512, None))
    asked: LayerSpec | None = None

    def unavailable(self, device: Device) -> str | None:
        return self.missing

    def supports(self, spec: LayerSpec, activations: ActivationPrecision) -> tuple[str, ...]:
        self.asked = spec
        return self.against

    def packed_nbytes(self, spec: LayerSpec) -> int:
        return spec.nbytes + 1000

    def fold_rows(self, spec: LayerSpec, device: Device) -> tuple[tuple[int, int | None], ...]:
        return self.rows

    def tiles(self, spec: LayerSpec, device: Device) -> str:
        return ""


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    """A faster backend in front of the others."""
    backend = Fake()
    monkeypatch.setattr(capability, "_REGISTRY", {"fake": backend, **capability._REGISTRY})
    return backend


def test_native_is_taken_where_a_backend_runs_the_layer_as_stored(fake: Fake) -> None:
    plan = plan_layer(SPEC, device="cpu", placement=Placement(2, 0, 2, 0))
    assert (plan.strategy, plan.arm, plan.backend, plan.activations) == ("native", "folded", "fake", "fp8")
    assert plan.reasons == (
        "fake: folds at 0 to 16, 512 or more tokens; otherwise two streams over the same weights, which measured "
        "faster on an H200 (native by name folds always)",
    )
    assert fake.asked == SPEC.local(Placement(2, 0, 2, 0))
    assert (plan.bytes_before, plan.extra_bytes) == (fake.asked.nbytes, 1000)


def test_folding_may_pay_at_some_batch_sizes_only(fake: Fake) -> None:
    plan = plan_layer(SPEC, device="cpu")
    assert [plan.folds_at(tokens) for tokens in (0, 16, 17, 511, 512, 9999)] == [True, True, False, False, True, True]
    assert not replace(plan, arm="serial").folds_at(1)


def test_native_by_name_folds_at_every_batch_size(fake: Fake) -> None:
    plan = plan_layer(SPEC, FusionPolicy("native"), device="cpu")
    assert all(plan.folds_at(tokens) for tokens in (0, 17, 511))
    assert plan.reasons == ()


@pytest.mark.parametrize("device", ["h200", "mi355x"])
def test_the_triton_backend_folds_small_batches_and_says_so(device: str) -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: the backend is unavailable whatever the device")
    plan = plan_layer(SPEC, FusionPolicy(backend="triton"), device=device)
    assert (plan.strategy, plan.fold_rows) == ("native", ((0, 32),))
    assert any(reason.startswith("triton: folds at 0 to 31 tokens") for reason in plan.reasons)


def test_a_backend_that_cannot_hands_over_to_the_next_with_its_reasons(fake: Fake) -> None:
    fake.against = ("no", "never")
    plan = plan_layer(SPEC, device="cpu")
    assert plan.strategy == "native"
    assert plan.backend != "fake"
    assert plan.reasons[:2] == ("fake: no", "fake: never")
    fake.against, fake.missing = (), "needs a machine that is not here"
    assert "fake: needs a machine that is not here" in plan_layer(SPEC, device="cpu").reasons


def test_where_no_backend_runs_the_layer_the_engine_keeps_it(fake: Fake) -> None:
    fake.against = ("too wide",)
    plan = plan_layer(SPEC, FusionPolicy(backend="fake"), "cpu")
    assert (plan.strategy, plan.arm, plan.backend) == ("serial", "stock", "stock")
    assert plan.reasons == ("fake: too wide", "no backend of ours runs this layer: the engine keeps it")
    assert plan.extra_bytes == 0


@pytest.mark.parametrize(
    ("fold", "arm", "backend", "reason"),
    [
        ("stock", "stock", "stock", "leaves the engine's own layer in place"),
        ("off", "serial", "torch", "after the routed experts"),
        ("dual", "dual-stream", "torch", "on a second stream"),
    ],
)
def test_what_the_policy_asks_not_to_fold_is_not_folded(fold: Fold, arm: str, backend: str, reason: str) -> None:
    plan = plan_layer(SPEC, FusionPolicy(fold, backend="torch"), "cpu")
    assert (plan.strategy, plan.arm, plan.backend, plan.folded) == ("serial", arm, backend, False)
    assert reason in plan.reasons[-1]
    assert str(plan).startswith(f"layers.0.ffn: {arm} on {backend}")


def test_without_a_shared_expert_there_is_nothing_to_fold() -> None:
    plan = plan_layer(replace(SPEC, shared=None), FusionPolicy(backend="torch"), "cpu")
    assert (plan.arm, plan.backend) == ("serial", "torch")
    assert "no shared expert" in plan.reasons[-1]


def test_another_activation_precision_is_named() -> None:
    plan = plan_layer(SPEC, FusionPolicy(activations="bf16", backend="torch"), "cpu")
    assert plan.activations == "bf16"
    assert plan.reasons == ("activations bf16 as asked; the checkpoint declares fp8",)


SLOT = FusionPolicy("slot", backend="torch")
ALLOWED = FusionPolicy("slot", allow_requantize=True, backend="torch")


def test_a_shared_expert_stored_as_the_routed_ones_takes_a_slot_as_it_is() -> None:
    plan = plan_layer(replace(SPEC, shared=replace(MXFP4, count=1)), SLOT, "cpu")
    assert (plan.strategy, plan.requantize, plan.padded_width, plan.extra_bytes) == ("slot", False, None, 0)


def test_a_narrower_shared_expert_is_padded_and_its_bytes_are_counted() -> None:
    plan = plan_layer(replace(SPEC, shared=ExpertSpec(1, 96, Format.MXFP4)), SLOT, "cpu")
    assert (plan.strategy, plan.padded_width) == ("slot", 192)
    assert plan.extra_bytes == MXFP4.nbytes(256) - ExpertSpec(1, 96, Format.MXFP4).nbytes(256)


def test_requantising_saves_bytes_and_is_said() -> None:
    plan = plan_layer(SPEC, ALLOWED, "cpu")
    assert (plan.strategy, plan.requantize) == ("slot", True)
    assert plan.extra_bytes == MXFP4.nbytes(256) - FP8.nbytes(256)


@pytest.mark.parametrize(
    ("spec", "policy", "reason"),
    [
        (SPEC, SLOT, "lowers precision; ask for it by name"),
        (replace(SPEC, shared=replace(FP8, width=33)), ALLOWED, "the shared width is odd, 33"),
        (replace(SPEC, shared=replace(FP8, width=256)), ALLOWED, "the shared expert is 256 wide, a routed slot 192"),
        (
            replace(SPEC, routed=replace(FP8, count=6), shared=ExpertSpec(1, 192, Format.BF16)),
            ALLOWED,
            "requantising bf16 -> fp8_128x128 is not supported",
        ),
        (replace(SPEC, routed=replace(FP8, count=6, e8m0_scales=False)), ALLOWED, "stored differently"),
        (
            replace(SPEC, shared=replace(MXFP4, count=1), shared_activation=Activation(7.0)),
            SLOT,
            "activations differ",
        ),
    ],
)
def test_what_keeps_a_shared_expert_out_of_a_slot_is_a_reason(
    spec: LayerSpec, policy: FusionPolicy, reason: str
) -> None:
    plan = plan_layer(spec, policy, "cpu")
    assert (plan.strategy, plan.arm, plan.backend) == ("serial", "serial", "torch")
    assert any(found.startswith("slot: ") and reason in found for found in plan.reasons), plan.reasons


@pytest.mark.parametrize(
    ("routed", "shared", "reasons"),
    [
        (
            ExpertSpec(6, 256, Format.FP8_128x128),
            ExpertSpec(1, 128, Format.FP8_128x128),
            (
                "slot: stored differently: shared 1x64 fp8_128x128 f32 in 64x64 blocks, "
                "routed 6x128 fp8_128x128 f32 in 128x128 blocks",
            ),
        ),
        (
            ExpertSpec(6, 96, Format.MXFP4),
            ExpertSpec(1, 96, Format.FP8_128x128, e8m0_scales=True),
            ("slot: stored differently: shared 1x48 mxfp4 in 1x32 blocks, routed 6x48 mxfp4 in 1x16 blocks",),
        ),
        (
            ExpertSpec(6, 256, Format.MXFP4),
            ExpertSpec(1, 66, Format.FP8_128x128, e8m0_scales=True),
            ("slot: requantising fp8_128x128 -> mxfp4 puts two columns into a byte; the shared width is odd, 33",),
        ),
        (ExpertSpec(6, 512, Format.FP8_128x128), ExpertSpec(1, 256, Format.FP8_128x128), ()),
        (ExpertSpec(6, 128, Format.MXFP4), ExpertSpec(1, 96, Format.FP8_128x128, e8m0_scales=True), ()),
    ],
)
def test_a_slot_is_decided_on_what_a_rank_holds(
    routed: ExpertSpec, shared: ExpertSpec, reasons: tuple[str, ...]
) -> None:
    """The whole layers fit a slot; a tensor-parallel cut may leave the two sets on different grids of scales."""
    spec = LayerSpec("layers.0.ffn", 256, 2, routed, shared)
    assert plan_layer(spec, ALLOWED, "cpu").strategy == "slot"
    plan = plan_layer(spec, ALLOWED, "cpu", Placement(tp_size=2))
    assert (plan.strategy, plan.reasons) == ("serial" if reasons else "slot", reasons)


def test_a_width_that_does_not_cut_leaves_the_layer_to_the_engine() -> None:
    plan = plan_layer(SPEC, device="cpu", placement=Placement(tp_size=5))
    assert plan.arm == "stock"
    assert plan.reasons == ("tensor parallel: a width of 192 does not cut into 5 equal mxfp4 shards",)


def test_every_rank_makes_the_same_decision() -> None:
    digests = {plan_layer(SPEC, device="cpu", placement=Placement(4, rank)).digest for rank in range(4)}
    assert len(digests) == 1
    plan = plan_layer(SPEC, FusionPolicy(backend="torch"), "cpu")
    assert plan.digest == replace(plan, reasons=("words",), bytes_before=1).digest
    for field, value in (("strategy", "slot"), ("backend", "x"), ("activations", "bf16"), ("padded_width", 256)):
        assert replace(plan, **{field: value}).digest != plan.digest


class ByExperts(Fake):
    """Folds always with few experts on a rank, and cannot do with none."""

    def supports(self, spec: LayerSpec, activations: ActivationPrecision) -> tuple[str, ...]:
        return () if spec.routed.count else ("nobody is here",)

    def fold_rows(self, spec: LayerSpec, device: Device) -> tuple[tuple[int, int | None], ...]:
        return self.rows if spec.routed.count >= 2 else ((0, None),)


@pytest.mark.parametrize("fold", ["auto", "slot"])
@pytest.mark.parametrize(("ranks", "backend"), [(4, "fake"), (5, "fake"), (8, "torch")])
def test_ranks_with_unequal_parts_decide_alike(
    ranks: int, backend: str, fold: Fold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """6 experts: 2 and 1 a rank, or 1 and none."""
    monkeypatch.setattr(capability, "_REGISTRY", {"fake": ByExperts(), "torch": capability.find("torch")})
    spec = replace(SPEC, shared=replace(MXFP4, count=1))
    plans = [plan_layer(spec, FusionPolicy(fold), "cpu", Placement(ranks, rank)) for rank in range(ranks)]
    assert len({plan.digest for plan in plans}) == 1
    assert {plan.backend for plan in plans} == {backend if fold == "auto" else "fake"}
    if fold == "auto":
        assert plans[-1].fold_rows == (ByExperts.rows if ranks < 6 else ((0, None),))
    assert [plan.bytes_before for plan in plans] == [spec.local(plan.placement).nbytes for plan in plans]
    assert len({plan.bytes_before for plan in plans}) == 2


def test_a_refusal_at_packing_keeps_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    other = Fake()
    other.name, other.rows = "other", ((0, 32),)  # type: ignore[misc]
    monkeypatch.setattr(capability, "_REGISTRY", {"fake": Fake(), "other": other})
    plan = without_backend(plan_layer(SPEC, FusionPolicy("native"), "cpu"), "a wide span", "cpu")
    assert (plan.backend, plan.fold_rows, plan.reasons) == ("other", ((0, None),), ("fake: a wide span",))
    plan = without_backend(plan_layer(SPEC, device="cpu"), "a wide span", "cpu")
    assert (plan.backend, plan.fold_rows) == ("other", ((0, 32),))
    assert plan.reasons[0] == "fake: a wide span"
    assert [reason.partition(" tokens;")[0] for reason in plan.reasons[1:]] == ["other: folds at 0 to 31"]


def test_a_backend_that_was_named_and_refuses_at_packing_is_an_error(fake: Fake) -> None:
    plan = plan_layer(SPEC, FusionPolicy("native", backend="fake"), "cpu")
    message = "no backend runs this layer: fake: a wide span; fake was asked for by name, so that no other is tried"
    with pytest.raises(ValueError, match=f"^layers.0.ffn: {message}$"):
        without_backend(plan, "a wide span", "cpu")


@pytest.mark.parametrize("choice", [{"fold": "sideways"}, {"activations": "int3"}, {"allow_requantize": "no"}])
def test_an_unknown_choice_names_the_known_ones(choice: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"must be (one of|True or False)"):
        FusionPolicy(**choice)  # type: ignore[arg-type]


def test_an_unknown_backend_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no backend called 'nobody'; there are: .*torch"):
        plan_layer(SPEC, FusionPolicy(backend="nobody"), KNOWN["cpu"])


def test_a_hopper_runs_its_own_backend_and_another_only_by_name() -> None:
    spec = LayerSpec(
        "layers.3.ffn",
        4096,
        6,
        ExpertSpec(256, 2048, Format.MXFP4),
        ExpertSpec(1, 2048, Format.FP8_128x128, e8m0_scales=True),
        activations="fp8",
    )
    assert plan_layer(spec, device="h200").backend == "hopper"
    assert plan_layer(spec, FusionPolicy(backend="triton"), device="h200").backend == "triton"
    plan = plan_layer(spec, device="b200")
    assert plan.backend != "hopper"
    assert any(reason.startswith("hopper: ") for reason in plan.reasons)
