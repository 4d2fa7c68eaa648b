"""One layer cut over R ranks, tokens dealt out unevenly, and a backend whose rows know nothing of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from foldmoe.backends import PackedLayer, register
from foldmoe.backends.torch.backend import TorchBackend, TorchLayer
from foldmoe.backends.torch.linear import upcast
from foldmoe.formats import Format
from foldmoe.moe import Activation, ExpertWeights, Placement
from foldmoe.moe.merge import append_expert
from foldmoe.parallel import ExpertParallelMoE, Tokens, Transport
from tests.support.cases import Case, make_layer, random_case
from tests.support.layers import fold_layer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.backends.torch.linear import Groups
    from foldmoe.layer import FoldedMoE

HIDDEN, WIDTH, SHARED_WIDTH, TOP_K = 160, 64, 64, 3
"""160 columns are a group of 128 and a short one."""


PLACED = (0, 3, 1, 4, 2, 3, 0)
"""Logical expert of each physical one, of 5 with 3 and 0 twice; PHYSICAL is its inverse."""
PHYSICAL = torch.tensor([[0, 6], [2, -1], [4, -1], [1, 5], [3, -1]])


class RowLayer(TorchLayer):
    """Every product has one row, so that a token's bits do not depend on how many came with it."""

    def _experts(self, x: Tensor, groups: Groups, weights: ExpertWeights, activation: Activation) -> Tensor:
        out, start = torch.empty(len(x), weights.hidden, dtype=x.dtype), 0
        for expert, count in enumerate(groups.sizes):
            for row in range(start, start + count):
                gate_up, down = (upcast(part[expert], x.dtype) for part in (weights.gate_up, weights.down))
                gate, up = torch.mm(x[row : row + 1], gate_up.t()).to(torch.float32).chunk(2, dim=-1)
                out[row] = torch.mm(self._operand(activation(gate, up)).to(x.dtype), down.t())[0]
            start += count
        return out


class RowBackend(TorchBackend):
    """The torch backend, deterministic."""

    name: ClassVar[str] = "rows"
    deterministic: ClassVar[bool] = True

    def pack(self, routed: ExpertWeights, shared: ExpertWeights | None, **options: Any) -> PackedLayer:
        del options["consume"]
        return RowLayer(routed, shared, **options)


def register_rows() -> None:
    register(RowBackend())


def pick(weights: ExpertWeights, experts: Sequence[int]) -> ExpertWeights:
    """Experts in any order, repeats allowed: a physical placement."""
    found = weights[experts[0] : experts[0] + 1] if experts else weights[:0]
    for expert in experts[1:]:
        found = append_expert(found, weights[expert : expert + 1])
    return found


def weights_of(experts: int, routed: Format = Format.MXFP4, shared: Format = Format.MXFP4) -> Any:
    """The whole layer's weights; the same on every rank that asks."""
    return make_layer(routed, shared, experts, WIDTH, SHARED_WIDTH, HIDDEN)


def shard(
    weights: tuple[ExpertWeights, ExpertWeights | None],
    ranks: int,
    rank: int,
    fold: str = "native",
    *,
    top_k: int = TOP_K,
    device: torch.device | str = "cpu",
    **facts: Any,
) -> FoldedMoE:
    """One rank's folded layer."""
    routed, shared = (part.to(device) if part else None for part in weights)
    assert routed is not None
    place = Placement(ep_size=ranks, ep_rank=rank)
    held = place.experts(routed.num_experts)
    facts = {"name": "layers.3.ffn"} | facts
    return fold_layer(
        routed[held.start : held.stop],
        shared,
        fold,  # type: ignore[arg-type]
        placement=place,
        num_experts=routed.num_experts,
        top_k=top_k,
        **facts,
    )


def virtual(
    weights: tuple[ExpertWeights, ExpertWeights | None], group: Transport, fold: str = "native", **options: Any
) -> ExpertParallelMoE:
    """All ranks of a simulation; options for the layer and for the exchange are told apart by name."""
    of_layer = {name: options.pop(name) for name in ("activations", "backend", "allow_requantize") if name in options}
    options.setdefault("max_tokens_per_rank", 16)
    top_k = options.pop("top_k", TOP_K)
    of_layer |= {"top_k": top_k, "device": group.device}
    layers = [shard(weights, group.size, rank, fold, **of_layer) for rank in range(group.size)]
    return ExpertParallelMoE(layers, group, **options)


def deal(case: Case, counts: Sequence[int]) -> list[Tokens]:
    """The rows of one case to ranks, ``counts`` each."""
    whole = Tokens(*case.args, case.shared_weights)
    ends = [sum(counts[: n + 1]) for n in range(len(counts))]
    assert ends[-1] == len(case.x)
    return [whole.rows(end - count, end) for end, count in zip(ends, counts, strict=True)]


def make_case(tokens: int, experts: int, top_k: int = TOP_K, **options: Any) -> Case:
    return random_case(tokens, top_k, experts, HIDDEN, **{"dtype": torch.float32} | options)


def crowd(case: Case, experts: int, ranks: int, rank: int) -> Case:
    """The same case with all routes, written over, on the experts of one rank: in turn, so that ids may repeat."""
    held = Placement(ep_size=ranks, ep_rank=rank).experts(experts)
    case.topk_ids.copy_(held.start + torch.arange(case.topk_ids.shape[1]) % len(held))
    return case


def redundant() -> tuple[ExpertWeights, ExpertWeights]:
    """A layer of 5 experts as PLACED has them; PHYSICAL goes with it."""
    routed, shared = weights_of(5)
    return pick(routed, PLACED), shared


def redundant_case(**options: Any) -> Case:
    """4 tokens that choose experts 0 and 3 in both of their places; both are on two ranks of two or three."""
    case = make_case(4, 5, **options)
    case.topk_ids.copy_(torch.tensor([[0, 3, 1], [3, 0, -1], [4, 3, 0], [-1, 0, 2]]))
    return case
