"""``python -m foldmoe.bench.parallel.virtual --shapes B,C,D``: the local launches of R ranks, all of them on one GPU.

Each rank holds a shape's experts, and gets what an all-gather of everybody's tokens brings it: its routes, and the
shared part of its own tokens. What is timed is each rank's local launch by itself, which is what R GPUs would do at the
same time; nothing crosses a link. Then what turns routes and nothing else: ``remap``, of one rank's own tokens to slots
(exchange kernels do it as they pack), and ``rank_routes``, of all ranks' tokens to one rank's experts (before a layer's
launches, where an engine gathered the tokens).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from foldmoe.backends import Call
from foldmoe.bench import shapes, timing, versions
from foldmoe.bench.parallel.layers import compile_kernels, layer_of, policy, whole
from foldmoe.bench.parallel.result import ParallelRequest
from foldmoe.parallel import ExpertParallelMoE, Tokens, remap, simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from foldmoe.layer import FoldedMoE

INPUTS = 3


def measure(request: ParallelRequest, device: torch.device) -> Iterator[tuple[int, str, list[float], int]]:
    """Tokens on every rank, arm, seconds of each rank's local launch, rows that it gets; then the two of routes alone.

    Args:
        request: shape, tokens, arms, rounds and ranks; the native scheme.
        device: where all ranks are.
    """
    spec, group = whole(request, request.ranks), simulate(request.ranks, device)
    arms = {arm: policy(request, "native", arm, device) for arm in request.arms}
    layers = {
        arm: [layer_of(spec, request.ranks, rank, 0, asked, device) for rank in range(request.ranks)]
        for arm, asked in arms.items()
    }
    most = max(request.tokens)
    moes = {arm: ExpertParallelMoE(held, group, most, "all_gather") for arm, held in layers.items()}
    for tokens in request.tokens:
        dice = torch.Generator(device).manual_seed(tokens)
        turns = []
        for _ in range(INPUTS):
            drawn = [shapes.random_batch(spec, tokens, dice) for _ in range(request.ranks)]
            turns.append([Tokens(one.x, one.topk_ids, one.topk_weights) for one in drawn])
        with torch.inference_mode():
            steps: dict[str, Callable[[int], object]] = {}
            for arm, moe in moes.items():
                calls = [
                    moe.dispatch([moe.route(r, one, 1.0) for r, one in enumerate(batches)], tokens) for batches in turns
                ]
                for rank, layer in enumerate(moe.local_layers):
                    mine = [batches[rank].call for batches in calls]
                    steps[f"{arm} {rank}"] = partial(_local, moe, layer, mine, tokens)
            alone = _routes(next(iter(moes.values())), turns)
            found = timing.interleaved(steps | alone, inputs=INPUTS, rounds=request.rounds, device=device)
        for arm in request.arms:
            yield tokens, arm, [found[f"{arm} {rank}"].median for rank in range(request.ranks)], request.ranks * tokens
        for name in alone:
            yield tokens, name, [found[name].median], tokens if name == "remap" else request.ranks * tokens


def _routes(moe: ExpertParallelMoE, turns: list[list[Tokens]]) -> dict[str, Callable[[int], object]]:
    """What turns routes of a turn's tokens, by name."""
    layer, slots, k = moe.local_layers[0], moe.scheme.slots, moe.scheme.top_k
    own = [batches[0] for batches in turns]
    gathered = [
        Call(
            torch.cat([one.x for one in batches]),
            torch.cat([one.topk_ids for one in batches]),
            torch.cat([one.topk_weights for one in batches]),
        )
        for batches in turns
    ]

    def of_rank(slot: bool, turn: int) -> object:
        return layer.packed.rank_routes(gathered[turn], layer.experts, moe.num_logical, slot=slot)

    return {
        "remap": lambda turn: remap(own[turn].topk_ids, own[turn].topk_weights, slots, 0, top_k=k),
        "rank_routes": partial(of_rank, False),
        "rank_routes, slot": partial(of_rank, True),
    }


def _local(moe: ExpertParallelMoE, layer: FoldedMoE, calls: list[Call], tokens: int, turn: int) -> object:
    return moe.run_local(layer, calls[turn], tokens)


def main(
    shape: Annotated[str, typer.Option("--shapes", help="Comma-separated shapes, each one rank's part.")] = "B,C,D",
    tokens: Annotated[str, typer.Option(help="Comma-separated tokens on every rank.")] = "1,8,32,128,512",
    arms: Annotated[str, typer.Option(help="folded, dual-stream.")] = "folded,dual-stream",
    ranks: Annotated[int, typer.Option(min=1, help="Virtual ranks.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 5,
) -> None:
    """Print a table for the documentation, a row as soon as it is measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(", ".join(f"{name} {version}" for name, version in versions.collect(device).items()))
    print("\n| shape | tokens a rank | rows | arm | slowest rank us | mean us |\n| --- | --- | --- | --- | --- | --- |")
    counts = tuple(int(part) for part in tokens.split(","))
    for name in shape.split(","):
        request = ParallelRequest(
            name, counts, arms=tuple(arms.split(",")), schemes=("native",), rounds=rounds, ranks=ranks
        )
        if device.type == "cuda":
            compile_kernels(request, ranks, device)
        for count, arm, seconds, rows in measure(request, device):
            slowest, mean = max(seconds) * 1e6, sum(seconds) / len(seconds) * 1e6
            print(f"| {name} | {count} | {rows} | {arm} | {slowest:,.1f} | {mean:,.1f} |", flush=True)


if __name__ == "__main__":
    typer.run(main)
