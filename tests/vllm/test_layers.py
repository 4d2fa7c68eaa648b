"""One layer built by vLLM's own factory in this process, against the float64 reference."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from foldmoe.formats import Format
from foldmoe.layer import FoldedMoE
from foldmoe.moe import Placement
from foldmoe.moe.merge import slot_weights
from foldmoe.planner import FusionPolicy
from foldmoe.reference import reference_moe
from tests.support.cases import assert_close, make_experts, make_layer

pytest.importorskip("vllm.model_executor", reason="vLLM is not in this environment; make test-vllm has one of its own")

from vllm import distributed
from vllm.model_executor.layers.fused_moe import MoERunner

from foldmoe.integrations.vllm import advice, plugin
from foldmoe.integrations.vllm.layers import FoldedRoutedExperts, FoldedRunner, Loaded
from foldmoe.integrations.vllm.method import FoldedMethod
from tests.vllm.factory import (
    EXPERTS,
    HIDDEN,
    SHARED,
    TOKENS,
    TOP_K,
    WIDTH,
    SharedMLP,
    build,
    call,
    has_cpu_routers,
    make_runner,
    routes,
)


@pytest.mark.parametrize(
    ("routed", "shared"),
    [
        (Format.BF16, Format.BF16),
        (Format.FP8_128x128, Format.FP8_128x128),
        (Format.MXFP4, Format.FP8_128x128),
        (Format.MXFP4, Format.BF16),
        (Format.FP8_128x128, Format.BF16),
        (Format.BF16, Format.FP8_128x128),
        (Format.MXFP4, Format.FP8_32x32),
    ],
    ids=lambda f: f.value,
)
@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("gated", [False, True], ids=["", "gated"])
def test_a_layer_is_the_reference(engine: Any, routed: Format, shared: Format, scale: float, gated: bool) -> None:
    """Every pair of formats; the routed scale reaches the routed part alone, once (cases 1 and 3)."""
    e8m0 = routed is Format.MXFP4
    pair = make_layer(routed, shared, EXPERTS, WIDTH, SHARED, HIDDEN, e8m0_scales=e8m0 if e8m0 else None)
    gate = nn.Linear(HIDDEN, 1, bias=False, dtype=torch.bfloat16) if gated else None
    name = f"layer.{routed.value}.{shared.value}.{scale}.{gated}"
    runner = build(
        pair[0], SharedMLP(pair[1], gate), name, routed_scaling_factor=scale, apply_routed_scale_to_output=True
    )
    assert type(runner) is FoldedRunner
    assert type(runner.routed_experts) is FoldedRoutedExperts
    assert isinstance(runner.routed_experts.quant_method, FoldedMethod)
    assert not list(runner.routed_experts.parameters()), "the raw parameters are gone"
    plan = plugin.record().entries[-1].plan
    assert plan is not None
    assert plan.folded
    assert plan.extra_bytes == 0

    x, logits = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.randn(TOKENS, EXPERTS, dtype=torch.bfloat16)
    ids, weights = routes(logits)
    s = None if gate is None else torch.sigmoid(gate(x).flatten().to(torch.float32)).detach()
    expected = reference_moe(
        x, ids, weights, *pair, shared_weights=s, routed_scale=scale, activations=plan.activations
    )  # fmt: skip
    found = call(engine, runner, x, logits)
    # In bf16 each of four products is rounded once, as by vLLM's own layer: a weighed shared part reaches 4.6e-3.
    assert_close(found, expected, 6e-3)
    assert call(engine, runner, x[:0], logits[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize("format", [Format.BF16, Format.MXFP4], ids=lambda f: f.value)
def test_a_call_of_16384_rows_is_the_reference(engine: Any, format: Format) -> None:
    """As many as a server's largest step; a small call afterwards is not disturbed by what the large one left."""
    mx = format is Format.MXFP4
    pair = make_layer(
        format, Format.FP8_128x128 if mx else format, EXPERTS, WIDTH, SHARED, HIDDEN, e8m0_scales=mx or None
    )
    runner = build(pair[0], SharedMLP(pair[1]), f"large.{format.value}")
    x, logits = torch.randn(16384, HIDDEN, dtype=torch.bfloat16), torch.randn(16384, EXPERTS, dtype=torch.bfloat16)
    expected = reference_moe(x, *routes(logits), *pair, activations="fp8" if mx else "bf16")
    assert_close(call(engine, runner, x, logits), expected, 6e-3)
    assert_close(call(engine, runner, x[:TOKENS], logits[:TOKENS]), expected[:TOKENS], 6e-3)


def test_a_layer_without_a_shared_expert_goes_back_to_vllm(engine: Any) -> None:
    """The parameters are vLLM's own again and the layer runs as ever."""
    runner = make_runner(
        EXPERTS, TOP_K, HIDDEN, WIDTH, params_dtype=torch.bfloat16, prefix="plain.experts", shared_experts=None
    )
    entry = plugin.record().entries[-1]
    assert entry.plan is None
    assert "no shared expert" in entry.reasons[0]
    assert type(runner.routed_experts.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    assert set(dict(runner.routed_experts.named_parameters())) == {"w13_weight", "w2_weight"}
    entry.loaded = True


def test_a_router_without_a_cpu_kernel_keeps_the_layer_in_vllm(engine: Any) -> None:
    """vLLM 0.25.1 routes by softmax in its own experts alone, where it runs on a CPU."""
    make_runner(
        EXPERTS,
        TOP_K,
        HIDDEN,
        WIDTH,
        params_dtype=torch.bfloat16,
        prefix="routed.experts",
        shared_experts=SharedMLP(make_experts(Format.BF16, 1, SHARED, HIDDEN)),
    )
    entry = plugin.record().entries[-1]
    entry.loaded = True
    if has_cpu_routers():
        assert entry.plan is not None
    else:
        assert entry.reasons == ("this vLLM routes on CPUs inside its own experts alone",)


def test_weights_come_once(engine: Any) -> None:
    """A reload is refused with what to do instead."""
    pair = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED, HIDDEN)
    runner = build(pair[0], SharedMLP(pair[1]), "reload")
    inner = runner.routed_experts
    with pytest.raises(RuntimeError, match=r"after the layer was packed; start .* FOLDMOE_FOLD=stock"):
        inner.weight_loader(None, torch.zeros(WIDTH, HIDDEN), "w13_weight", "w1", 0)
    with pytest.raises(RuntimeError, match="takes its weights once"):
        inner.quant_method.process_weights_after_loading(inner)


def test_a_lowered_shared_expert_is_freed(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot fold with requantising keeps the slot alone, no FP8 weights beside it."""
    monkeypatch.setattr(plugin.record(), "policy", FusionPolicy("slot", allow_requantize=True))
    pair = make_layer(Format.MXFP4, Format.FP8_128x128, EXPERTS, WIDTH, WIDTH, HIDDEN, e8m0_scales=True)
    mlp = SharedMLP(pair[1])
    stored = [StorageWeakRef(linear.weight.untyped_storage()) for linear in (mlp.gate_up_proj, mlp.down_proj)]
    runner = build(pair[0], mlp, "lowered")
    gc.collect()
    assert all(storage.expired() for storage in stored)
    plan = plugin.record().entries[-1].plan
    assert plan is not None
    assert (plan.strategy, plan.requantize) == ("slot", True)
    x, logits = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.randn(TOKENS, EXPERTS, dtype=torch.bfloat16)
    lowered = slot_weights(pair[1], requantize=True, padded_width=None)
    ids, weights = routes(logits)
    assert_close(
        call(engine, runner, x, logits), reference_moe(x, ids, weights, pair[0], lowered, activations="fp8"), 6e-3
    )


def test_the_op_is_opaque_to_the_compiler(engine: Any) -> None:
    pair = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED, HIDDEN)
    method = build(pair[0], SharedMLP(pair[1]), "compiled").routed_experts.quant_method
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    ids, weights = routes(torch.randn(TOKENS, EXPERTS))

    def call(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        y: Tensor = method.apply(None, x, weights, ids)
        return y

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, weights, ids), call(x, weights, ids))
    torch.library.opcheck(torch.ops.foldmoe.vllm_layer, (x, weights, ids, method.handle), test_utils="test_faketensor")


def test_a_whole_layer_compiles_into_one_graph_that_holds_the_op(engine: Any) -> None:
    """vLLM's runner, the folded layer in it: no graph break, the op as one node, and bit for bit what eager says."""
    pair = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED, HIDDEN)
    runner = build(pair[0], SharedMLP(pair[1]), "compiled whole")
    x, logits = torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16), torch.randn(TOKENS, EXPERTS, dtype=torch.bfloat16)
    graphs = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    expected = call(engine, runner, x, logits)
    found = call(engine, torch.compile(runner, fullgraph=True, backend=keep), x, logits)
    assert torch.equal(found, expected)
    (graph,) = graphs
    targets = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    print(targets)
    assert "foldmoe.vllm_layer" in " ".join(targets)


def test_data_parallel_ranks_add_the_shared_part_of_their_own_rows(
    engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with 4 and 3 tokens; their partial sums are the reference. vLLM's CPU groups gather no uneven rows."""
    pair = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED, HIDDEN)
    gate = nn.Linear(HIDDEN, 1, bias=False, dtype=torch.bfloat16)
    method = build(
        pair[0], SharedMLP(pair[1], gate), "parallel", routed_scaling_factor=2.5, apply_routed_scale_to_output=True
    )
    method = method.routed_experts.quant_method
    method.exchanges = True
    x = torch.randn(7, HIDDEN, dtype=torch.bfloat16)
    ids, weights = routes(torch.randn(7, EXPERTS))
    metadata = SimpleNamespace(get_chunk_sizes_across_dp_rank=lambda: [4, 3])
    monkeypatch.setattr("vllm.forward_context.get_forward_context", lambda: SimpleNamespace(dp_metadata=metadata))
    parts = []
    for rank, rows in enumerate((slice(0, 4), slice(4, 7))):
        group = SimpleNamespace(
            rank_in_group=rank,
            dispatch=lambda *_: (x, weights, ids),
            combine=lambda y, _, rows=rows: parts.append(y) or y[rows],
        )
        monkeypatch.setattr("vllm.distributed.get_dp_group", lambda group=group: group)
        monkeypatch.setattr("vllm.distributed.get_ep_group", lambda group=group: group)
        experts = pair[0][4 * rank : 4 * rank + 4]
        method.layer = FoldedMoE(experts, pair[1], placement=Placement(2, rank), top_k=TOP_K, num_experts=EXPERTS)
        with torch.no_grad():
            own = method.run(x[rows], weights[rows], ids[rows])
        assert own.shape == x[rows].shape
    s = torch.sigmoid(gate(x).flatten().to(torch.float32)).detach()
    expected = reference_moe(x, ids, weights, *pair, shared_weights=s, routed_scale=2.5)
    assert_close(parts[0].double() + parts[1].double(), expected, 6e-3)


def test_the_plugin_is_active_where_it_is_installed() -> None:
    """vLLM only logs a plugin that does not load: the entry point must be there and lead to ``register``."""
    assert plugin.active() == "foldmoe = foldmoe.integrations.vllm:register"
    assert advice.plugin_state().ok


def test_a_runner_of_a_subclass_stays_with_vllm_by_name(engine: Any) -> None:
    """vLLM builds those itself: the layer gets its line and vLLM's own method, shared expert and all."""

    class LatentRunner(MoERunner):  # type: ignore[misc]
        pass

    mlp = SharedMLP(make_experts(Format.BF16, 1, SHARED, HIDDEN))
    facts = {"runner_cls": LatentRunner, "params_dtype": torch.bfloat16, "prefix": "latent.experts"}
    runner = make_runner(EXPERTS, TOP_K, HIDDEN, WIDTH, shared_experts=mlp, **facts)
    assert type(runner) is LatentRunner
    entry = plugin.record().entries[-1]
    assert (entry.name, entry.plan) == ("latent.experts", None)
    assert entry.reasons == ("vLLM runs it with LatentRunner",)
    assert not isinstance(runner.routed_experts.quant_method, FoldedMethod)
    assert isinstance(runner.foldmoe_loaded, Loaded)
    entry.loaded = True


def test_a_shared_expert_of_two_layers_is_folded_once_or_refused(engine: Any) -> None:
    """Ernie-4.5-VL builds one for its text and its vision experts."""

    class Ernie4_5_VLMoeMLP(SharedMLP):  # noqa: N801  vLLM's own name
        pass

    pair = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED, HIDDEN)
    facts = {"params_dtype": torch.bfloat16, "custom_routing_function": lambda gating_output, **_: None}
    for part in ("text", "vision"):
        make_runner(
            EXPERTS, TOP_K, HIDDEN, WIDTH, prefix=f"ernie.{part}", shared_experts=Ernie4_5_VLMoeMLP(pair[1]), **facts
        )
        entry = plugin.record().entries[-1]
        assert "serves two sets of routed experts: text and vision experts" in entry.reasons[0]
        entry.loaded = True
    mlp = SharedMLP(pair[1])
    make_runner(EXPERTS, TOP_K, HIDDEN, WIDTH, prefix="twice.one", shared_experts=mlp, **facts)
    with pytest.raises(RuntimeError, match=r"twice.two: its shared expert is twice.one's too"):
        make_runner(EXPERTS, TOP_K, HIDDEN, WIDTH, prefix="twice.two", shared_experts=mlp, **facts)
    for entry in plugin.record().entries[-2:]:
        entry.loaded = True


def test_a_dropped_engine_frees_its_packed_weights(engine: Any) -> None:
    pair = make_layer(Format.BF16, Format.BF16, EXPERTS, WIDTH, SHARED, HIDDEN)
    runner = build(pair[0], SharedMLP(pair[1]), "dropped")
    entry = plugin.record().entries[-1]
    assert isinstance(entry.moe, FoldedMoE)
    assert not entry.gone
    del runner, engine.compilation_config.static_forward_context[entry.name]  # the configuration goes with its engine
    gc.collect()
    assert entry.moe is None
    assert entry.gone


@pytest.mark.parametrize("elastic", [False, True], ids=["no group for experts", "elastic"])
def test_layers_load_where_ranks_have_no_group_for_experts(
    engine: Any, elastic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM makes none for a model that it does not take for one with experts; elastic groups are unknown to torch."""

    def no_group() -> Any:
        raise AssertionError("expert parallel group is not initialized" if not elastic else "asked for a group")

    monkeypatch.setattr(distributed, "get_ep_group", no_group)
    monkeypatch.setattr(engine.parallel_config, "enable_elastic_ep", elastic)
    mlp = SharedMLP(make_experts(Format.BF16, 1, SHARED, HIDDEN))
    facts = {"params_dtype": torch.bfloat16, "custom_routing_function": lambda gating_output, **_: None}
    runner = make_runner(EXPERTS, TOP_K, HIDDEN, WIDTH, prefix=f"groupless.{elastic}", shared_experts=mlp, **facts)
    entry = plugin.record().entries[-1]
    assert entry.folded is not elastic
    monkeypatch.setattr(plugin.record(), "entries", [entry])  # the last one, so that ranks are asked
    runner.foldmoe_loaded.quant_method.process_weights_after_loading(runner.foldmoe_loaded)
    assert entry.loaded
