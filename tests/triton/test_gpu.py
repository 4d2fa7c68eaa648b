"""On a real GPU: a pairwise set over formats, widths, batch sizes and routings; equal bits; graphs, streams, offsets.

Compiling is most of the time: formats come with two pairs of widths each, and all that the pairwise set needs is
compiled by several processes at once before the first test.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest
import torch

pytest.importorskip("triton")

from foldmoe.backends.base import Call
from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import ExpertWeights
from foldmoe.runtime import workspace
from tests.support.cases import CASE_NAMES, Case, assert_close, get_case, random_case
from tests.support.warming import once_a_session
from tests.triton.support import PAIRS, TOLERANCE, call_of, expected, pack, weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foldmoe.backends.triton.layer import TritonLayer

pytestmark = pytest.mark.gpu

EXPERTS, TOP_K, HIDDEN = 8, 3, 512
TOKENS = (0, 1, 2, 3, 7, 8, 17, 64, 65, 129, 1000, 8192)
WIDTHS = ((64, 192), (288, 320), (2048, 2048), (2304, 64), (192, 3072), (3072, 288), (320, 2304))
"""(routed, shared)"""


def pairwise() -> Iterator[tuple[str, str, tuple[int, int], int, str]]:
    """Every format pair meets every batch size; widths, precisions and routings turn at different speeds."""
    routings = [name for name in CASE_NAMES if name != "no_tokens"]
    n = 0
    for i, pair in enumerate(PAIRS):
        for j, tokens in enumerate(TOKENS):
            widths = WIDTHS[(i + j // 6) % len(WIDTHS)]
            yield pair, ("bf16", "fp8")[(i + j // 6) % 2], widths, tokens, routings[n % len(routings)]
            n += 1


@cache
def gpu_weights(pair: str, widths: tuple[int, int]) -> tuple[ExpertWeights, ExpertWeights]:
    return weights(pair, EXPERTS, *widths, HIDDEN, device="cuda")


@cache
def gpu_layer(pair: str, activations: str, widths: tuple[int, int]) -> TritonLayer:
    return pack(*gpu_weights(pair, widths), activations)


def warm(job: tuple[str, str, tuple[int, int], tuple[int, ...]]) -> None:
    """Fill Triton's cache on disk for one layer; runs in a process of its own."""
    pair, activations, widths, batches = job
    layer = gpu_layer(pair, activations, widths)
    for tokens in batches:
        case = random_case(tokens, TOP_K, EXPERTS, HIDDEN).to("cuda")
        for folded in (True, False):
            layer.forward(call_of(case), folded=folded)
    torch.cuda.synchronize()


@pytest.fixture(scope="module", autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    if sum(item.name.startswith("test_pairwise") for item in request.session.items) < 20:
        return
    jobs: dict[tuple[str, str, tuple[int, int]], set[int]] = {}
    for pair, activations, widths, tokens, _ in pairwise():
        jobs.setdefault((pair, activations, widths), set()).add(tokens)
    once_a_session("triton", warm, [(*key, tuple(sorted(batches - {0}))) for key, batches in jobs.items()])


def poison() -> None:
    """NaN in the scratch memory that the next call takes, and in memory that its output may get."""
    for held in workspace._held.values():
        held.memory.fill_(255)
    torch.full((2**24,), torch.nan, device="cuda")


@pytest.mark.parametrize(("pair", "activations", "widths", "tokens", "routing"), list(pairwise()))
def test_pairwise(pair: str, activations: str, widths: tuple[int, int], tokens: int, routing: str) -> None:
    layer = gpu_layer(pair, activations, widths)
    case = get_case(routing, tokens, TOP_K, EXPERTS, HIDDEN, id_dtype=torch.int32 if tokens % 2 else torch.int64).to(
        "cuda"
    )
    poison()
    folded = layer.forward(call_of(case), folded=True)
    assert_close(folded, expected(case, *gpu_weights(pair, widths), activations), TOLERANCE[activations])
    poison()
    assert torch.equal(folded, layer.forward(call_of(case), folded=False))


@pytest.mark.parametrize("pair", ["mxfp4-fp8", "bf16-bf16"])
def test_one_scale_a_token(pair: str) -> None:
    widths = (288, 192)
    case = random_case(65, TOP_K, EXPERTS, HIDDEN).to("cuda")
    y = gpu_layer(pair, "fp8_token", widths).forward(call_of(case), folded=True)
    assert_close(y, expected(case, *gpu_weights(pair, widths), "fp8_token"), TOLERANCE["fp8_token"])


def part(case: Case, rows: torch.Tensor) -> Case:
    return replace(case, x=case.x[rows], topk_ids=case.topk_ids[rows], topk_weights=case.topk_weights[rows])


BITS = [("mxfp4-fp8_e8m0", "fp8"), ("mxfp4-mxfp4", "bf16"), ("fp8-fp8", "fp8"), ("bf16-bf16", "bf16")]


@pytest.mark.parametrize(("pair", "activations"), BITS)
def test_same_token_same_bits(pair: str, activations: str) -> None:
    layer = gpu_layer(pair, activations, (2048, 2048))
    case = random_case(8192, TOP_K, EXPERTS, HIDDEN).to("cuda")
    whole = layer.forward(call_of(case), folded=True)
    order = torch.randperm(8192, device="cuda")
    assert torch.equal(layer.forward(call_of(part(case, order)), folded=True), whole[order])
    for count in (1, 2, 17, 33, 64, 129, 1000):
        rows = order[:count]
        assert torch.equal(layer.forward(call_of(part(case, rows)), folded=True), whole[rows]), f"batch of {count}"
    for _ in range(20):
        assert torch.equal(layer.forward(call_of(case), folded=True), whole)


def test_two_streams_at_once() -> None:
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


def test_dual_streams_agree_with_folded() -> None:
    layer = gpu_layer("mxfp4-fp8_e8m0", "fp8", (2048, 2048))
    case = random_case(64, TOP_K, EXPERTS, HIDDEN).to("cuda")
    y = layer.forward_dual(call_of(case), torch.cuda.Stream())
    torch.cuda.synchronize()
    assert_close(y, layer.forward(call_of(case), folded=True).double(), 6e-3)


def test_graph_with_padding_rows_gives_eager_bits() -> None:
    layer = gpu_layer("mxfp4-fp8_e8m0", "fp8", (2048, 2048))
    case = random_case(8, TOP_K, EXPERTS, HIDDEN).to("cuda")
    x, ids, gates = (t.clone() for t in case.args)
    valid = torch.tensor([8], dtype=torch.int32, device="cuda")
    rows = torch.tensor([0, 8], dtype=torch.int32, device="cuda")
    call = Call(x, ids, gates, num_valid_tokens=valid, shared_rows=rows)
    layer.forward(call, folded=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer.forward(call, folded=True)
    layer.forward(call_of(random_case(1000, TOP_K, EXPERTS, HIDDEN).to("cuda")), folded=True)  # scratch memory grows
    for live in (3, 8, 1, 0):
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
    layer = gpu_layer("mxfp8-fp8", "fp8", (96, 96))
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
    """74,899 tokens x top-7 x 2I = 2**31 + ..; H is small so that the slots fit."""
    tokens, top_k, width, hidden = 74_899, 7, 2048, 64
    stored = weights("mxfp4-fp8_e8m0", EXPERTS, width, 64, hidden, device="cuda")
    layer = pack(stored[0], stored[1], "fp8")
    case = random_case(tokens, top_k, EXPERTS, hidden).to("cuda")
    y = layer.forward(call_of(case), folded=True)
    rows = torch.tensor([0, 1, tokens // 2, tokens - 2, tokens - 1], device="cuda")
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
