"""On a real Hopper: layers through ``FoldedMoE``, over formats, widths, batch sizes and routings; equal bits; graphs.

    pytest -m gpu -n 8 tests/hopper/test_gpu.py

Compiling a launch takes about ten seconds. All launches that the pairwise set needs are compiled first, by several
processes at once and by one pytest worker for all.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton", reason="NOT CHECKED: the Hopper backend needs triton (pip install foldmoe[gpu])")

from foldmoe.backends.hopper import heuristics
from foldmoe.backends.hopper.backend import HopperBackend
from foldmoe.backends.hopper.packing import pack_layer
from foldmoe.bench.shapes import SHAPES, random_weights
from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import Activation, ExpertWeights
from foldmoe.planner.devices import resolve
from foldmoe.reference import reference_moe
from foldmoe.runtime import workspace
from tests.hopper.gpu_layers import (
    BF16,
    EXPERTS,
    FINE,
    FLOAT,
    FP8,
    MAIN,
    TOP_K,
    WIDE,
    Shape,
    case_of,
    config,
    gpu_layer,
    gpu_weights,
    jobs,
    make,
    pairwise,
    run,
    warm,
)
from tests.support.cases import BF16_TOLERANCE, Case, assert_close, assert_same_bits, random_case
from tests.support.poison import nan_in_new_memory, poison
from tests.support.warming import once_a_session
from tests.triton.support import LIMIT, call_of, expected, weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foldmoe.backends.hopper.layer import HopperLayer

_MISSING = HopperBackend().unavailable(resolve("cuda" if torch.cuda.is_available() else "cpu"))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(_MISSING is not None, reason=f"NOT CHECKED: the Hopper backend {_MISSING}"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]


@pytest.fixture(scope="module", autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    if sum(item.name.startswith("test_pairwise") for item in request.session.items) < 20:
        return
    names = " ".join(item.name for item in request.session.items)
    once_a_session("hopper", warm, [job for job in jobs() if f"[{job[0]}-" in names or f"[{job[0]}]" in names])


@pytest.fixture(autouse=True)
def _nan() -> Iterator[None]:
    with nan_in_new_memory():
        yield


@pytest.mark.parametrize(("shape", "tokens", "routing"), pairwise(), ids=str)
def test_pairwise(shape: Shape, tokens: int, routing: str) -> None:
    layer = gpu_layer(shape)
    case = case_of(shape, tokens, routing)
    poison()
    folded = run(layer, case)
    assert_close(folded, expected(case, *gpu_weights(shape), shape.activations), *shape.tolerance(tokens))
    poison()
    assert_same_bits(layer.packed.forward(call_of(case), folded=False), folded, "two launches")


@pytest.mark.parametrize("shape", [FP8, BF16], ids=str)
@pytest.mark.parametrize("tokens", [1, 8, 17, 129, 1000])
def test_one_loop_for_both_sets(tokens: int, shape: Shape) -> None:
    """Routed and shared tiles of one width and clamp take one K loop; the numbers are those of two."""
    stored = gpu_weights(shape)
    layer = make(*stored, clamp=LIMIT)
    case = random_case(tokens, TOP_K, EXPERTS, shape.hidden).to("cuda")
    poison()
    y = run(layer, case)
    clamps = {"activation": Activation(LIMIT), "shared_activation": Activation(LIMIT)}
    want = reference_moe(*case.args, *stored, activations=shape.activations, **clamps)
    assert_close(y, want, *shape.tolerance(tokens))
    poison()
    assert_same_bits(layer.packed.forward(call_of(case), folded=False), y, "two launches")
    packed: HopperLayer = layer.packed  # type: ignore[assignment]
    chosen = packed._last
    assert chosen is not None
    if chosen.one_loop:
        packed.config = heuristics.build(chosen.geometry, chosen.tokens, 32, chosen.warpgroups)
        assert packed.config.two_loops
        assert torch.equal(y, run(layer, case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_of_x(dtype: torch.dtype) -> None:
    case = random_case(17, TOP_K, EXPERTS, WIDE.hidden, dtype=dtype).to("cuda")
    y = run(gpu_layer(WIDE), case)
    assert y.dtype == dtype
    assert_close(y, expected(case, *gpu_weights(WIDE), "fp8"), *WIDE.tolerance(17))


def test_shared_part_alone() -> None:
    case = random_case(17, TOP_K, EXPERTS, WIDE.hidden).to("cuda")
    layer = gpu_layer(WIDE).packed
    shared = layer.forward_shared(replace(call_of(case), shared_rows=(3, 11)))
    routed = layer.forward(replace(call_of(case), shared_rows=(0, 0)), folded=True)
    assert shared.dtype == torch.float32
    assert not shared[:3].any()
    assert not shared[11:].any()
    want = expected(replace(case, shared_rows=(3, 11)), *gpu_weights(WIDE), "fp8")
    assert_close(routed.double() + shared, want, *WIDE.tolerance(17))


def part(case: Case, rows: torch.Tensor) -> Case:
    return replace(case, x=case.x[rows], topk_ids=case.topk_ids[rows], topk_weights=case.topk_weights[rows])


@pytest.mark.parametrize("shape", MAIN, ids=str)
def test_same_token_same_bits(shape: Shape) -> None:
    """200 calls: where a slot was given back before its last scales were read, one call in 60 differed (FINE_FP8)."""
    layer = gpu_layer(shape)
    case = random_case(8192, TOP_K, EXPERTS, shape.hidden).to("cuda")
    whole = run(layer, case)
    order = torch.randperm(8192, device="cuda")
    assert_same_bits(run(layer, part(case, order)), whole[order], "in another order")
    for count in (1, 2, 17, 64, 129, 200, 1000):
        rows = order[:count]
        assert_same_bits(run(layer, part(case, rows)), whole[rows], f"batch of {count}")
    for turn in range(200):
        assert_same_bits(run(layer, case), whole, f"call {turn}")


@pytest.mark.parametrize("tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("shared_width", [128, 0])
def test_a_cut_k_gives_the_bits_of_a_whole_one(shared_width: int, tokens: int) -> None:
    """V4-Flash's hidden size, and a narrow part of its experts."""
    shape = Shape("mxfp4-fp8_e8m0", 4096, 128, shared_width)
    layer = make(*gpu_weights(shape))
    packed: HopperLayer = layer.packed  # type: ignore[assignment]
    case = random_case(tokens, TOP_K, EXPERTS, shape.hidden).to("cuda")
    chosen = config(shape, tokens)
    assert chosen.parts > 1
    packed.config = replace(chosen, parts=1)
    whole = run(layer, case)
    packed.config = None
    side = torch.cuda.Stream()
    for turn in range(50):
        poison()
        assert_same_bits(run(layer, case), whole, f"folded, call {turn}")
        assert_same_bits(packed.forward_dual(call_of(case), side), whole, f"two streams, call {turn}")
    assert packed._last == chosen


@pytest.mark.parametrize("shape", [WIDE, FP8, BF16], ids=str)
def test_dual_streams_give_the_folded_bits(shape: Shape) -> None:
    case = random_case(64, TOP_K, EXPERTS, shape.hidden).to("cuda")
    want = run(gpu_layer(shape), case)
    dual = gpu_layer(shape, "dual")
    assert dual.plan.arm == "dual-stream"
    for turn in range(20):
        poison()
        assert_same_bits(run(dual, case), want, f"call {turn}")


def test_case_67_two_streams_at_once() -> None:
    layers = [gpu_layer(WIDE), gpu_layer(FINE)]
    cases = [random_case(129, TOP_K, EXPERTS, s.hidden, seed=i).to("cuda") for i, s in enumerate((WIDE, FINE))]
    wanted = [run(layer, case) for layer, case in zip(layers, cases, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(100):
        found = []
        for layer, case, stream in zip(layers, cases, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(run(layer, case))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("tokens", [8, 65])
@pytest.mark.parametrize("shape", MAIN, ids=str)
def test_graph_with_padding_rows_gives_eager_bits(shape: Shape, tokens: int) -> None:
    layer = gpu_layer(shape)
    case = random_case(tokens, TOP_K, EXPERTS, shape.hidden).to("cuda")
    x, ids, gates = (t.clone() for t in case.args)
    bounds = {
        "num_valid_tokens": torch.tensor([tokens], dtype=torch.int32, device="cuda"),
        "shared_rows": torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
    }
    layer(x, ids, gates, **bounds)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = layer(x, ids, gates, **bounds)
        y = layer(x, ids, gates, **bounds)  # a second layer takes the first one's scratch memory
    run(layer, random_case(1000, TOP_K, EXPERTS, shape.hidden).to("cuda"))  # scratch memory grows
    for live in (3, tokens, 1, 0):
        x.copy_(case.x)
        x[live:] = torch.nan
        gates[live:] = torch.nan
        bounds["num_valid_tokens"].fill_(live)
        poison()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(first, y)
        assert (y[live:] == 0).all()
        if live:
            assert torch.equal(y[:live], run(layer, part(case, torch.arange(live, device="cuda"))))
        gates.copy_(case.topk_weights)


def test_a_compile_during_capture_is_refused() -> None:
    layer = make(*gpu_weights(FLOAT))
    geometry = layer.packed.weights.geometry  # type: ignore[attr-defined]
    layer.packed.config = heuristics.build(geometry, 8, 64, 4)  # type: ignore[attr-defined]
    case = random_case(4, TOP_K, EXPERTS, FLOAT.hidden).to("cuda")
    with pytest.raises(RuntimeError, match="warm up first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(layer, case)


def test_ids_out_of_range_are_no_routes_and_are_counted() -> None:
    layer = make(*gpu_weights(FLOAT))
    case = random_case(5, TOP_K, EXPERTS, FLOAT.hidden).to("cuda")
    stray = case.topk_ids.clone()
    stray[0, 0], stray[3, 1] = EXPERTS, -7
    none = torch.where((stray < 0) | (stray >= EXPERTS), -1, stray)
    y = run(layer, replace(case, topk_ids=stray))
    assert torch.equal(y, run(layer, replace(case, topk_ids=none)))
    assert layer.stats()["ids_out_of_range"] == 2


@pytest.mark.parametrize("pair", ["mxfp4-fp8_e8m0", "fp8-fp8", "bf16-bf16"])
@pytest.mark.parametrize("routing", ["one expert", "one token an expert"])
def test_skew(routing: str, pair: str) -> None:
    stored = weights(pair, 256, 64, 64, 128, device="cuda")
    tokens = 8192 if routing == "one expert" else 256
    case = random_case(tokens, 1, 256, 128).to("cuda")
    ids = torch.full((tokens, 1), 200) if routing == "one expert" else torch.randperm(256)[:, None]
    case = replace(case, topk_ids=ids.to("cuda"))
    precision, tolerance = ("bf16", BF16_TOLERANCE) if pair == "bf16-bf16" else ("fp8", 8e-3)
    assert_close(run(make(*stored), case), expected(case, *stored, precision), tolerance)


def test_batches_are_cut_where_offsets_pass_2_31() -> None:
    """74,899 tokens x top-7 x 2I passes 2**31; H is small so that the slots fit."""
    tokens, top_k, width, hidden = 74_899, 7, 2048, 128
    stored = weights("mxfp4-fp8_e8m0", EXPERTS, width, 64, hidden, device="cuda")
    layer = make(*stored)
    case = random_case(tokens, top_k, EXPERTS, hidden).to("cuda")
    case = replace(case, shared_rows=(1, tokens - 1), num_valid_tokens=tokens - 1)
    y = run(layer, case)
    rows = torch.tensor([1, tokens // 2, tokens - 3, tokens - 2], device="cuda")
    few = replace(part(case, rows), shared_rows=None, num_valid_tokens=None)
    assert torch.equal(run(layer, few), y[rows])
    assert not y[tokens - 1].any()
    assert_close(y[rows], expected(few, *stored, "fp8"), 8e-3)
    workspace.release()


def test_experts_past_2_32_codes() -> None:
    experts, width, hidden = 272, 2048, 4096
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")

    def stack(rows: int, columns: int) -> QuantizedTensor:
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device="cuda")
        scales = torch.full((experts, rows, columns // 32), 120, dtype=torch.uint8, device="cuda")
        return QuantizedTensor(codes, scales, format=Format.MXFP4)

    routed = ExpertWeights(stack(2 * width, hidden), stack(hidden, width))
    layer = make(routed, None)
    case = random_case(4, 2, experts, hidden).to("cuda")
    case = replace(case, topk_ids=torch.tensor([[271, 0], [270, 256], [1, 271], [255, 257]], device="cuda"))
    y = run(layer, case)
    used = case.topk_ids.unique()
    few = ExpertWeights(*(t.map(lambda s: s[used].contiguous()) for t in (routed.gate_up, routed.down)))
    renamed = replace(case, topk_ids=torch.searchsorted(used, case.topk_ids))
    assert_close(y, expected(renamed, few, None, "fp8"), 6e-3)


@pytest.mark.parametrize("shape", [FINE, FP8, BF16], ids=str)
def test_unpack_gives_the_stored_bits(shape: Shape) -> None:
    back = [w for w in gpu_layer(shape).unpack() if w]
    for found, stored in zip(back, [w for w in gpu_weights(shape) if w], strict=True):
        for a, b in ((found.gate_up, stored.gate_up), (found.down, stored.down)):
            for name, tensor in b.tensors().items():
                assert torch.equal(*(t.contiguous().view(torch.uint8) for t in (a.tensors()[name], tensor)))


def test_a_layer_of_real_size_is_packed_in_time_and_place() -> None:
    """V4-Flash's 3.4 GB in under 2 s (the fastest of three: others share the host), with under 5 % more at the peak."""
    torch.use_deterministic_algorithms(False)  # its kernels for indexed writes sort first: slower, with more memory
    spec = SHAPES["A"].spec
    assert spec.shared
    generator, took = torch.Generator("cuda").manual_seed(0), []
    for _ in range(3):
        stored = [random_weights(part, spec.hidden, generator) for part in (spec.routed, spec.shared)]
        held, allowed = torch.cuda.memory_allocated(), sum(part.nbytes for part in stored) / 20
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        packed = pack_layer(stored[0], stored[1], spec.activation, spec.shared_activation, consume=True)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
        assert packed.experts == spec.routed.count
        assert torch.cuda.max_memory_allocated() - held < allowed
        del stored, packed
    assert min(took) < 2
