"""What worker processes run. The first argument is the process group; tensors come back as numpy arrays."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from foldmoe.parallel import DistributedTransport, ExpertParallelMoE, agree, simulate
from foldmoe.planner import FusionPolicy, plan_checkpoint
from tests.parallel.support import TOP_K, crowd, deal, make_case, pick, shard, virtual, weights_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foldmoe.parallel import Tokens


def build(
    group: Any, fold: str, experts: int, placed: Sequence[int] | None = None, **options: Any
) -> ExpertParallelMoE:
    """This rank's layer; ``placed`` names the logical expert of each physical one."""
    routed, shared = weights_of(experts)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    of_layer = {name: options.pop(name) for name in ("activations", "backend") if name in options}
    device = DistributedTransport(group).device
    layer = shard((pick(routed, placed) if placed else routed, shared), size, rank, fold, device=device, **of_layer)
    options.setdefault("max_tokens_per_rank", 16)
    return ExpertParallelMoE(layer, group, **options)


def call(moe: ExpertParallelMoE, tokens: Tokens) -> torch.Tensor:
    y: torch.Tensor = moe(tokens.x, tokens.topk_ids, tokens.topk_weights)
    return y


def forward(
    group: Any,
    fold: str,
    experts: int,
    counts: Sequence[int],
    seed: int = 0,
    late: Sequence[int] = (),
    crowded: int | None = None,
    **options: Any,
) -> Any:
    """This rank's rows of the seeded case; ranks in ``late`` come 100 ms after the others, at every collective.

    ``crowded``: all routes are on this rank's experts.
    """
    dtype = options.get("dtype", torch.float32)
    moe = build(group, fold, experts, **{"dtype": dtype, "count_load": True} | options)
    rank = dist.get_rank(group)
    if rank in late:
        _delay(moe.transport)
    case = make_case(sum(counts), experts, seed=seed, dtype=dtype)
    if crowded is not None:
        crowd(case, experts, len(counts), crowded)
    y = call(moe, deal(case.to(moe.transport.device), counts)[rank])
    return {"y": y.to("cpu", torch.float32).numpy(), "stats": moe.stats(), "load": moe.load().tolist()}


def _delay(transport: Any) -> None:
    for name in ("all_gather", "all_to_all"):
        original = getattr(transport, name)

        def slow(*arguments: Any, original: Any = original) -> Any:
            time.sleep(0.1)
            return original(*arguments)

        setattr(transport, name, slow)


def plan_rounds(rank: int, turn: int, most: int) -> int:
    """Tokens of one rank in one round: its own dice, so that no rank knows the others'."""
    dice = torch.Generator().manual_seed(1000 * turn + rank)
    return max(0, int(torch.randint(-2, most + 1, (1,), generator=dice)))


def many(group: Any, rounds: int, experts: int = 5) -> list[Any]:
    """Random rounds over both strategies and both folds; this rank's outputs."""
    rank = dist.get_rank(group)
    kinds = [build(group, fold, experts, **options) for fold, options in KINDS]
    return [call(kinds[turn % len(kinds)], own_tokens(rank, turn, experts)).numpy() for turn in range(rounds)]


KINDS: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (fold, {"dtype": torch.float32, "backend": "rows", "max_tokens_per_rank": 4, "overflow": "rounds"} | options)
    for fold in ("native", "slot")
    for options in (
        {"strategy": "all_gather"},
        {"strategy": "all_to_all"},
        {"strategy": "all_to_all", "order": "route", "activations": "fp8"},
    )
)


def own_tokens(rank: int, turn: int, experts: int) -> Tokens:
    count = plan_rounds(rank, turn, 6)
    return deal(make_case(count, experts, seed=1000 * turn + rank), [count])[0]


def one_sided(group: Any, rounds: int, fold: str, experts: int = 9) -> dict[str, Any]:
    """Random rounds over symmetric memory on GPUs, the first ones beside an all-gather."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "activations": "fp8", "backend": "auto"}
    moe, plain = (build(group, fold, experts, strategy=strategy, **options) for strategy in ("symmetric", "all_gather"))
    rank, device, same, finite = dist.get_rank(group), moe.transport.device, True, torch.ones((), device="cuda")
    for turn in range(rounds):
        count = plan_rounds(rank, turn, 6)
        case = make_case(count, experts, seed=1000 * turn + rank, dtype=torch.bfloat16).to(device)
        y = moe(*case.args)
        finite *= y.isfinite().all()
        if turn < 20:
            same = same and torch.equal(y, plain(*case.args))
    return {"fallback": moe.fallback, "same": same, "finite": bool(finite), "stats": moe.stats()}


def one_sided_graph(group: Any, replays: int, fold: str, experts: int = 9) -> dict[str, Any]:
    """One captured exchange, replayed with new tokens each time, at times 20 ms late on one rank."""
    options: dict[str, Any] = {"dtype": torch.bfloat16, "activations": "fp8", "backend": "auto"}
    moe, plain = (build(group, fold, experts, strategy=strategy, **options) for strategy in ("symmetric", "all_gather"))
    rank, device, counts = dist.get_rank(group), moe.transport.device, [5, 2]
    cases = [
        make_case(counts[rank], experts, seed=10 * turn + rank, dtype=torch.bfloat16).to(device) for turn in range(9)
    ]
    expected = [plain(*case.args) for case in cases]
    inputs = [tensor.clone() for tensor in cases[0].args]
    moe(*inputs, tokens_across_ranks=counts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = moe(*inputs, tokens_across_ranks=counts)
    same = True
    for turn in range(replays):
        case = cases[turn % len(cases)]
        for held, new in zip(inputs, case.args, strict=True):
            held.copy_(new)
        if turn % 50 == 10 + rank:
            torch.cuda.synchronize()
            time.sleep(0.02)
        graph.replay()
        same = same and torch.equal(y, expected[turn % len(cases)])
    return {"fallback": moe.fallback, "same": same, "stats": moe.stats()}


def one_sided_silent(group: Any, timeout: float) -> tuple[str, bool, float]:
    """Rank 1 opens its mailbox and never writes."""
    from foldmoe.parallel.mailbox import open_mailboxes
    from foldmoe.parallel.one_sided import OneSided

    moe = build(group, "native", 4, strategy="symmetric", backend="auto", dtype=torch.bfloat16)
    boxes = open_mailboxes(moe.transport, moe.scheme.mailbox_bytes, timeout)
    if dist.get_rank(group) == 1:
        return "", False, 0.0
    moe.exchange = OneSided(moe.scheme, boxes, moe._strays)
    case = make_case(3, 4, dtype=torch.bfloat16).to(moe.transport.device)
    started = time.monotonic()
    y = moe(*case.args, tokens_across_ranks=[3, 3])
    lost = bool(y.isnan().all())
    took = time.monotonic() - started
    try:
        moe.stats()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", lost, took
    return "no error", lost, took


def many_virtual(ranks: int, rounds: int, experts: int = 5) -> list[list[Any]]:
    """The same rounds, simulated: outputs by round, then rank."""
    group, weights = simulate(ranks), weights_of(experts)
    kinds = [virtual(weights, group, fold, **options) for fold, options in KINDS]
    return [
        [
            y.numpy()
            for y in kinds[turn % len(kinds)].forward_ranks([own_tokens(r, turn, experts) for r in range(ranks)])
        ]
        for turn in range(rounds)
    ]


def differing_policies(group: Any, folder: str, folds: Sequence[str]) -> None:
    """Every rank plans the same checkpoint with a policy of its own."""
    policy = FusionPolicy(folds[dist.get_rank(group)], backend="torch")  # type: ignore[arg-type]
    agree(plan_checkpoint(folder, policy=policy, ep_size=dist.get_world_size(group), device="cpu"), group)


def differing_layers(group: Any, folds: Sequence[str]) -> None:
    build(group, folds[dist.get_rank(group)], 4, dtype=torch.float32)


def too_many(group: Any, counts: Sequence[int]) -> None:
    """Capacity 8."""
    forward(group, "native", 4, counts, max_tokens_per_rank=8)


def one_rank_wrong(group: Any, away: bool = False) -> None:
    """Rank 1's route list carries one id too many; or its weights lie on another device."""
    moe = build(group, "native", 4, dtype=torch.float32)
    rank = dist.get_rank(group)
    tokens = deal(make_case(3, 4, top_k=TOP_K + (0 if away else rank)), [3])[0]
    call(moe, replace(tokens, topk_weights=tokens.topk_weights.to("meta")) if away and rank else tokens)


def one_rank_wrong_and_untold(group: Any, timeout: float) -> tuple[str, float]:
    """The same where counts are stated, in a group of ranks 0 and 1 with a short timeout."""
    del group
    pair, rank = dist.new_group([0, 1], timeout=timedelta(seconds=timeout)), dist.get_rank()
    if rank > 1:
        return "", 0.0
    moe = build(pair, "native", 4, dtype=torch.float32)
    tokens = deal(make_case(3, 4, top_k=TOP_K + rank), [3])[0]
    started = time.monotonic()
    try:
        moe(tokens.x, tokens.topk_ids, tokens.topk_weights, tokens_across_ranks=[3, 3])
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "no error", 0.0


def no_memory(group: Any) -> str:
    """Symmetric memory of which rank 1 gets none; the others would wait for it where they map each other's."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    from foldmoe.parallel import mailbox

    def empty(shape: Any, **_: Any) -> torch.Tensor:
        if dist.get_rank(group) == 1:
            raise MemoryError
        return torch.empty(shape, dtype=torch.uint8)

    with ExitStack() as patches:
        for where, name, value in (
            (mailbox, "_obstacle", lambda _: None),
            (mailbox, "_unreachable", lambda _: None),
            (symmetric_memory, "empty", empty),
            (symmetric_memory, "rendezvous", lambda *_: dist.barrier(group)),
            (torch.cuda, "synchronize", lambda _: None),
        ):
            patches.enter_context(patch.object(where, name, value))
        fallback = build(group, "native", 4, strategy="symmetric", dtype=torch.float32).fallback
    return fallback or ""


def dies(group: Any, timeout: float) -> str:
    """The last rank of a group with a short timeout leaves without a word after one good round."""
    own = dist.new_group(list(range(dist.get_world_size(group))), timeout=timedelta(seconds=timeout))
    moe = build(own, "native", 4, dtype=torch.float32)
    tokens = deal(make_case(3, 4), [3])[0]
    call(moe, tokens)
    if dist.get_rank(group) == dist.get_world_size(group) - 1:
        os._exit(1)
    started = time.monotonic()
    try:
        call(moe, tokens)
    except RuntimeError as error:
        return f"{type(error).__name__} after {time.monotonic() - started:.1f} s: {error}"
    return "no error"


def silent(group: Any, timeout: float) -> tuple[str, float]:
    """Rank 1 of a group with a short timeout never makes the call."""
    del group
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=timeout))
    if dist.get_rank() > 1:
        return "", 0.0
    moe = build(pair, "native", 4, dtype=torch.float32)
    if dist.get_rank() == 1:
        time.sleep(timeout + 1)
        return "", 0.0
    started = time.monotonic()
    try:
        call(moe, deal(make_case(3, 4), [3])[0])
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return "no error", 0.0
