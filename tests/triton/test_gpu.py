"""On a real GPU: a pairwise set over formats, widths, batch sizes and routings; equal bits; graphs, streams, offsets.

Compiling is most of the time: all that the pairwise set needs is compiled by several processes at once before the first
test.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton")

from foldmoe.backends.base import Call, own_routes, strays
from foldmoe.backends.triton.rank_routes import rank_routes
from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import ExpertWeights
from foldmoe.runtime import workspace
from tests.support.cases import Case, assert_close, get_case, random_case
from tests.support.poison import nan_in_new_memory, poison
from tests.support.warming import once_a_session
from tests.triton.gpu_layers import (
    EXPERTS,
    HIDDEN,
    MAIN,
    TOP_K,
    Layer,
    gpu_layer,
    gpu_weights,
    jobs,
    pairwise,
    warm,
)
from tests.triton.rank_cases import COUNT, OWN, calls, same
from tests.triton.support import TOLERANCE, call_of, expected, pack, weights

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deterministic")]


@pytest.fixture(scope="module", autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    if sum(item.name.startswith("test_pairwise") for item in request.session.items) >= 20:
        once_a_session("triton", warm, jobs())


@pytest.fixture(autouse=True)
def _nan() -> Iterator[None]:
    with nan_in_new_memory():
        yield


@pytest.mark.parametrize(("layer", "tokens", "routing"), pairwise(), ids=str)
def test_pairwise(layer: Layer, tokens: int, routing: str) -> None:
    dtype = torch.int32 if tokens % 2 else torch.int64
    case = get_case(routing, tokens, TOP_K, EXPERTS, HIDDEN, id_dtype=dtype).to("cuda")
    packed = gpu_layer(*layer)
    poison()
    folded = packed.forward(call_of(case), folded=True)
    want = expected(case, *gpu_weights(layer.pair, layer.widths), layer.activations)
    assert_close(folded, want, TOLERANCE[layer.activations])
    poison()
    assert torch.equal(folded, packed.forward(call_of(case), folded=False))


@pytest.mark.parametrize("pair", ["mxfp4-fp8", "bf16-bf16"])
def test_one_scale_a_token(pair: str) -> None:
    widths = (288, 192)
    case = random_case(65, TOP_K, EXPERTS, HIDDEN).to("cuda")
    y = gpu_layer(pair, "fp8_token", widths).forward(call_of(case), folded=True)
    assert_close(y, expected(case, *gpu_weights(pair, widths), "fp8_token"), TOLERANCE["fp8_token"])


def test_routes_of_one_rank() -> None:
    for (call, slot), (same_call, _) in zip(calls("cuda"), calls("cpu"), strict=True):
        found = torch.zeros(1, dtype=torch.int64, device="cuda")
        same(rank_routes(call, OWN, COUNT, slot, found), own_routes(same_call, OWN, slot))
        assert int(found) == int(strays(same_call, COUNT))


def part(case: Case, rows: torch.Tensor) -> Case:
    return replace(case, x=case.x[rows], topk_ids=case.topk_ids[rows], topk_weights=case.topk_weights[rows])


@pytest.mark.parametrize("chosen", MAIN, ids=str)
def test_same_token_same_bits(chosen: Layer) -> None:
    layer = gpu_layer(*chosen)
    case = random_case(8192, TOP_K, EXPERTS, HIDDEN).to("cuda")
    whole = layer.forward(call_of(case), folded=True)
    order = torch.randperm(8192, device="cuda")
    assert torch.equal(layer.forward(call_of(part(case, order)), folded=True), whole[order])
    for count in (1, 2, 17, 33, 64, 129, 1000):
        rows = order[:count]
        assert torch.equal(layer.forward(call_of(part(case, rows)), folded=True), whole[rows]), f"batch of {count}"
    for turn in range(100):
        assert torch.equal(layer.forward(call_of(case), folded=True), whole), f"call {turn}"


def test_case_67_two_streams_at_once() -> None:
    layers = [gpu_layer("mxfp4-fp8_e8m0", "fp8", (2048, 2048)), gpu_layer("fp8-fp8", "fp8", (2048, 2048))]
    cases = [random_case(129, TOP_K, EXPERTS, HIDDEN, seed=seed).to("cuda") for seed in (1, 2)]
    wanted = [layer.forward(call_of(case), folded=True) for layer, case in zip(layers, cases, strict=True)]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(100):
        found = []
        for layer, case, stream in zip(layers, cases, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(layer.forward(call_of(case), folded=True))
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_dual_streams_give_the_bits_of_folded() -> None:
    layer = gpu_layer("mxfp4-fp8_e8m0", "fp8", (2048, 2048))
    case = random_case(64, TOP_K, EXPERTS, HIDDEN).to("cuda")
    side, folded = torch.cuda.Stream(), layer.forward(call_of(case), folded=True)
    y = layer.forward_dual(call_of(case), side)
    torch.cuda.synchronize()
    assert torch.equal(y, folded)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.forward_dual(call_of(case), side)
    for _ in range(10):
        poison()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, folded)


@pytest.mark.parametrize("tokens", [8, 65])
@pytest.mark.parametrize("chosen", [MAIN[0], MAIN[5], MAIN[6]], ids=str)
def test_graph_with_padding_rows_gives_eager_bits(chosen: Layer, tokens: int) -> None:
    layer = gpu_layer(*chosen)
    case = random_case(tokens, TOP_K, EXPERTS, HIDDEN).to("cuda")
    x, ids, gates = (t.clone() for t in case.args)
    valid = torch.tensor([tokens], dtype=torch.int32, device="cuda")
    rows = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    call = Call(x, ids, gates, num_valid_tokens=valid, shared_rows=rows)
    layer.forward(call, folded=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.forward(call, folded=True)
    layer.forward(call_of(random_case(1000, TOP_K, EXPERTS, HIDDEN).to("cuda")), folded=True)  # scratch memory grows
    for live in (3, tokens, 1, 0):
        x.copy_(case.x)
        x[live:] = torch.nan
        gates[live:] = torch.nan
        valid.fill_(live)
        poison()
        graph.replay()
        torch.cuda.synchronize()
        assert (y[live:] == 0).all()
        if live:
            assert torch.equal(
                y[:live], layer.forward(call_of(part(case, torch.arange(live, device="cuda"))), folded=True)
            )
        gates.copy_(case.topk_weights)


def test_a_compile_during_capture_is_refused() -> None:
    layer = gpu_layer("fp8_32-fp8_32", "fp8", (96, 96))  # formats that no other test here compiles
    case = random_case(4, TOP_K, EXPERTS, HIDDEN).to("cuda")
    with pytest.raises(RuntimeError, match="warm up first"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer.forward(call_of(case), folded=True)


def test_ids_out_of_range_are_no_routes_and_are_counted() -> None:
    layer = pack(*gpu_weights("mxfp4-fp8", (64, 192)), "bf16")
    case = random_case(5, TOP_K, EXPERTS, HIDDEN).to("cuda")
    stray = case.topk_ids.clone()
    stray[0, 0], stray[3, 1] = EXPERTS, -7
    none = torch.where((stray < 0) | (stray >= EXPERTS), -1, stray)
    y = layer.forward(call_of(replace(case, topk_ids=stray)), folded=True)
    assert torch.equal(y, layer.forward(call_of(replace(case, topk_ids=none)), folded=True))
    assert layer.stats()["ids_out_of_range"] == 2


@pytest.mark.parametrize("routing", ["one expert", "one token an expert"])
def test_skew(routing: str) -> None:
    stored = weights("mxfp4-fp8_e8m0", 256, 64, 64, 128, device="cuda")
    layer = pack(stored[0], stored[1], "fp8")
    tokens = 8192 if routing == "one expert" else 256
    case = random_case(tokens, 1, 256, 128).to("cuda")
    ids = torch.full((tokens, 1), 200) if routing == "one expert" else torch.randperm(256)[:, None]
    case = replace(case, topk_ids=ids.to("cuda"))
    y = layer.forward(call_of(case), folded=True)
    assert_close(y, expected(case, *stored, "fp8"), TOLERANCE["fp8"])


def test_offsets_past_2_31() -> None:
    """Element offsets, in 13 GB of scratch memory; each buffer's last rows lie past 2**31 = 2,147,483,648.

    Hidden vectors (bf16): 75,000 tokens x top-7 = 525,000 routes x I = 4096 are 2,150,400,000, the last 712 of the last
    expert's past it. Slots (float32): (525,000 + 75,000) x H = 3584 are 2,150,400,000 too, the shared ones of the last
    813 tokens past it.
    """
    tokens, top_k, width, hidden = 75_000, 7, 4096, 3584
    assert tokens * top_k * width > 2**31
    assert tokens * (top_k + 1) * hidden > 2**31
    if torch.cuda.mem_get_info()[0] < 18 * 2**30:
        pytest.skip("needs 18 GiB of free GPU memory")
    stored = weights("mxfp4-fp8_e8m0", EXPERTS, width, 64, hidden, device="cuda")
    layer = pack(stored[0], stored[1], "fp8")
    case = random_case(tokens, top_k, EXPERTS, hidden).to("cuda")
    y = layer.forward(call_of(case), folded=True)
    last = (case.topk_ids == EXPERTS - 1).any(dim=-1).nonzero()[-3:, 0]  # their hidden vectors are the very last
    rows = torch.cat([torch.tensor([0, 1, tokens // 2, tokens - 700, tokens - 2, tokens - 1], device="cuda"), last])
    few = part(case, rows)
    assert torch.equal(layer.forward(call_of(few), folded=True), y[rows])
    assert_close(y[rows], expected(few, *stored, "fp8"), TOLERANCE["fp8"])
    workspace.release()


def test_experts_past_2_32_codes() -> None:
    """A view of the last experts of a stack of 2**32 codes and more, read through the stack's own strides."""
    experts, width, hidden = 272, 2048, 4096
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB of free GPU memory")

    def stack(rows: int, columns: int) -> QuantizedTensor:
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device="cuda")
        scales = torch.full((experts, rows, columns // 32), 120, dtype=torch.uint8, device="cuda")
        return QuantizedTensor(codes, scales, format=Format.MXFP4)

    routed = ExpertWeights(stack(2 * width, hidden), stack(hidden, width))
    layer = pack(routed, None, "bf16")
    case = random_case(4, 2, experts, hidden).to("cuda")
    case = replace(case, topk_ids=torch.tensor([[271, 0], [270, 256], [1, 271], [255, 257]], device="cuda"))
    y = layer.forward(call_of(case), folded=True)
    used = case.topk_ids.unique()
    few = ExpertWeights(*(t.map(lambda s: s[used].contiguous()) for t in (routed.gate_up, routed.down)))
    renamed = replace(case, topk_ids=torch.searchsorted(used, case.topk_ids))
    assert_close(y, expected(renamed, few, None, "bf16"), TOLERANCE["bf16"])
