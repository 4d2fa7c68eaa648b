"""Folded, serial and on two streams: the same launches' bits, one rounding, and streams that wait for each other."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.backends.triton.steps import Step
from tests.runtime.test_streams import Stream
from tests.support.cases import random_case
from tests.triton.support import call_of, pack, weights

if TYPE_CHECKING:
    from collections.abc import Iterator

    from foldmoe.backends import Call
    from foldmoe.backends.triton.layer import TritonLayer

TOKENS, TOP_K, EXPERTS, HIDDEN = 40, 2, 4, 128


def layer_and_call(pair: str = "bf16-bf16", dtype: torch.dtype = torch.bfloat16) -> tuple[TritonLayer, Call]:
    layer = pack(*weights(pair, EXPERTS, 64, 64, HIDDEN), "bf16" if pair == "bf16-bf16" else "fp8")
    case = random_case(TOKENS, TOP_K, EXPERTS, HIDDEN, dtype=dtype)
    return layer, replace(call_of(case), routed_scale=1.7, shared_weights=torch.rand(TOKENS), shared_rows=(3, 31))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pair", ["bf16-bf16", "mxfp4-fp8"])
def test_all_arms_give_the_same_bits(pair: str, dtype: torch.dtype) -> None:
    layer, call = layer_and_call(pair, dtype)
    folded = layer.forward(call, folded=True)
    assert torch.equal(layer.forward(call, folded=False), folded)
    assert torch.equal(layer.forward_dual(call, None), folded)
    assert torch.equal(layer.forward_dual(replace(call, num_valid_tokens=17), None)[:17], folded[:17])
    apart = layer.forward_routed(call) + layer.forward_shared(call)
    assert torch.equal(apart.to(dtype), folded)  # rounded once there too


def test_two_streams_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, call = layer_and_call()
    log: list[str] = []
    main, side = Stream("main", log), Stream("side", log)
    current = [main]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    def told(name: str) -> None:
        before = getattr(Step, name)

        def method(self: Step, *arguments: Any) -> None:
            sets = [part for part, held in zip(("routed", "shared"), arguments, strict=False) if held is not None]
            log.append(" ".join([name, *(sets if name == "multiply" else []), "on", current[-1].name]))
            before(self, *arguments)

        monkeypatch.setattr(Step, name, method)

    for name in ("prepare", "multiply", "combine"):
        told(name)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    y = layer.forward_dual(call, side)  # type: ignore[arg-type]
    assert log == [
        "prepare on main",
        "side waits for main",
        "multiply shared on side",
        "multiply routed on main",
        "main waits for side",
        "combine on main",
    ]
    log.clear()
    assert torch.equal(layer.forward(call, folded=False), y)
    layer.forward_dual(replace(call, shared_rows=(2, 2)), side)  # type: ignore[arg-type]
    assert not [line for line in log if "side" in line]  # one set alone needs no second stream


def test_ranks_that_start_the_same_kernels_keep_a_shared_part_that_no_row_gets() -> None:
    layer, call = layer_and_call()
    nowhere = replace(call, shared_rows=(5, 5))
    without = layer.forward(nowhere, folded=True)
    for rows in ((5, 5), (0, 0), (TOKENS, TOKENS)):
        agreed = replace(nowhere, shared_rows=rows, most_rows=2 * TOKENS)
        assert torch.equal(layer.forward(agreed, folded=True), without)
        assert torch.equal(layer.forward(agreed, folded=False), without)
        assert torch.equal(layer.forward_dual(agreed, None), without)
        assert not layer.forward_shared(agreed).any()
