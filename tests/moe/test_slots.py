from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from foldmoe.moe.slots import SlotMap, append_shared_slot, expert_load, to_physical

INTEGERS = [torch.int32, torch.int64]
COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(lambda counts: sum(counts) > 0)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("per_rank", "ranks"), [(1, 1), (2, 2), (3, 4), (32, 8)])
def test_even_slots_follow_the_formula(per_rank: int, ranks: int, dtype: torch.dtype) -> None:
    slots = SlotMap.even(per_rank * ranks, ranks)
    ids = torch.arange(per_rank * ranks, dtype=dtype)
    assert torch.equal(slots.to_slots(ids), ids + ids // per_rank)
    assert slots.to_slots(ids).dtype == dtype
    assert [slots.shared_slot(r) for r in range(ranks)] == [r * (per_rank + 1) + per_rank for r in range(ranks)]


@given(COUNTS, st.sampled_from(INTEGERS))
def test_slots_lie_rank_by_rank_with_the_shared_one_last(counts: list[int], dtype: torch.dtype) -> None:
    slots = SlotMap(tuple(counts))
    ids = torch.arange(slots.num_experts, dtype=dtype)
    expected, shared, expert = [], [], 0
    layout: list[int | None] = []
    for count in counts:
        layout += [*range(expert, expert + count), None]
        expert += count
    for position, held in enumerate(layout):
        (shared if held is None else expected).append(position)
    assert slots.to_slots(ids).tolist() == expected
    assert [slots.shared_slot(r) for r in range(len(counts))] == shared
    assert slots.num_slots == len(layout)


@given(COUNTS, st.sampled_from(INTEGERS))
def test_from_slots_is_the_inverse_and_a_shared_slot_is_no_expert(counts: list[int], dtype: torch.dtype) -> None:
    slots = SlotMap(tuple(counts))
    ids = torch.arange(-1, slots.num_experts, dtype=dtype)
    assert torch.equal(slots.from_slots(slots.to_slots(ids)), ids)
    shared = torch.tensor([slots.shared_slot(r) for r in range(len(counts))], dtype=dtype)
    assert (slots.from_slots(shared) == -1).all()


def test_experts_that_do_not_divide_go_to_the_first_ranks() -> None:
    assert SlotMap.even(7, 3).experts_per_rank == (3, 2, 2)


@pytest.mark.parametrize("ids", [[[0, 4]], [[-2, 1]]])
def test_ids_out_of_range_are_refused(ids: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"expert ids must lie in -1 \.\. 3"):
        SlotMap((2, 2)).to_slots(torch.tensor(ids))
    with pytest.raises(ValueError, match=r"slots must lie in -1 \.\. 5"):
        SlotMap((2, 2)).from_slots(torch.tensor([6]))


def test_ids_that_are_no_integers_are_refused() -> None:
    with pytest.raises(TypeError, match=r"must be int32 or int64, found torch\.float32"):
        SlotMap((2, 2)).to_slots(torch.zeros(2))


@pytest.mark.parametrize("counts", [(), (2, -1)])
def test_impossible_counts_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="counts >= 0 of at least one rank"):
        SlotMap(counts)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_that_does_not_exist_has_no_shared_slot(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of 2"):
        SlotMap((2, 2)).shared_slot(rank)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_append_needs_only_the_local_expert_count_and_the_rank(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 3], [-1, 2], [-1, -1]], dtype=dtype)
    weights = torch.tensor([[0.25, 0.75], [0.0, 1.0], [0.0, 0.0]])
    slot_ids, slot_weights = append_shared_slot(ids, weights, experts_per_rank=2, rank=1, top_k=2)
    assert slot_ids.tolist() == [[0, 4, 5], [-1, 3, 5], [-1, -1, 5]]
    assert slot_ids.dtype == dtype
    assert slot_weights.tolist() == [[0.25, 0.75, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]


def test_appending_leaves_the_arguments_alone() -> None:
    ids, weights = torch.tensor([[0, 3]]), torch.tensor([[0.5, 0.5]])
    append_shared_slot(ids, weights, experts_per_rank=2, rank=0, top_k=2)
    assert (ids.tolist(), weights.tolist()) == ([[0, 3]], [[0.5, 0.5]])


def test_shared_weights_go_into_the_last_column() -> None:
    ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
    gate = torch.tensor([[0.25, 9.0], [0.5, 9.0]])[:, 0]  # not contiguous
    _, found = append_shared_slot(ids, weights, experts_per_rank=2, rank=0, top_k=1, shared_weights=gate)
    assert found.tolist() == [[1.0, 0.25], [1.0, 0.5]]
    with pytest.raises(ValueError, match=r"shared_weights must be \[2\], found \[3\]"):
        append_shared_slot(ids, weights, experts_per_rank=2, rank=0, top_k=1, shared_weights=torch.ones(3))


@pytest.mark.parametrize("ranks", [None, 2])
@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
def test_no_tokens_and_no_routes(shape: tuple[int, int], ranks: int | None) -> None:
    ids, weights = append_shared_slot(
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape),
        experts_per_rank=2,
        rank=1,
        top_k=shape[1],
        ranks=ranks,
    )
    assert ids.shape == weights.shape == (shape[0], shape[1] + 1)
    assert (ids == 5).all()


def test_uneven_ranks_are_given_as_one_count_each() -> None:
    ids, _ = append_shared_slot(torch.arange(7)[None], torch.ones(1, 7), experts_per_rank=(3, 2, 2), rank=2, top_k=7)
    assert ids.tolist() == [[0, 1, 2, 4, 5, 7, 8, 9]]


def test_no_value_on_a_device_is_looked_at_where_the_ranks_are_known() -> None:
    """A look would end a CUDA graph's capture; a meta tensor has nothing to look at."""
    ids, weights = torch.zeros(3, 2, dtype=torch.int32, device="meta"), torch.ones(3, 2, device="meta")
    for counts, ranks in ((2, 4), ((2, 2, 2, 2), None)):
        found = append_shared_slot(
            ids, weights, experts_per_rank=counts, rank=1, top_k=2, ranks=ranks, shared_weights=weights[:, 0]
        )
        assert [(rows.shape, rows.dtype) for rows in found] == [((3, 3), torch.int32), ((3, 3), torch.float32)]


def test_a_list_that_carries_a_slot_already_is_refused_by_its_width() -> None:
    once = append_shared_slot(torch.tensor([[0, 1]]), torch.ones(1, 2), experts_per_rank=2, rank=0, top_k=2)
    with pytest.raises(ValueError, match=r"3 wide but the router chooses 2.*never comes from the router"):
        append_shared_slot(*once, experts_per_rank=2, rank=0, top_k=2)


def test_a_list_that_carries_a_slot_already_is_refused_by_its_ids() -> None:
    once = append_shared_slot(torch.tensor([[2, 3]]), torch.ones(1, 2), experts_per_rank=2, rank=1, top_k=2, ranks=2)
    with pytest.raises(ValueError, match=r"must lie in -1 \.\. 3, found 3 \.\. 5"):
        append_shared_slot(*once, experts_per_rank=2, rank=1, top_k=3, ranks=2)


@pytest.mark.parametrize(
    ("ids", "weights"),
    [(torch.zeros(3, dtype=torch.int64), torch.ones(3)), (torch.zeros(3, 2).long(), torch.ones(3, 1))],
)
def test_ids_and_weights_must_have_one_shape(ids: Tensor, weights: Tensor) -> None:
    with pytest.raises(ValueError, match=r"must both be \[M, K\]"):
        append_shared_slot(ids, weights, experts_per_rank=2, rank=0, top_k=2)


def test_redundant_experts_are_mapped_before_the_slots() -> None:
    physical = torch.tensor([[0, 4], [1, -1], [2, -1], [3, 5]])  # experts 0 and 3 have two replicas
    logical = torch.tensor([[0, 3], [0, 3], [1, -1], [2, 0]], dtype=torch.int32)
    found = to_physical(logical, physical)
    assert found.tolist() == [[0, 3], [4, 5], [1, -1], [2, 4]]
    assert found.dtype == logical.dtype
    slots, _ = append_shared_slot(found, torch.ones(4, 2), experts_per_rank=3, rank=0, top_k=2, ranks=2)
    assert slots.tolist() == [[0, 4, 3], [5, 6, 3], [1, -1, 3], [2, 5, 3]]


def test_an_expert_without_a_replica_is_refused_where_a_token_chose_it() -> None:
    physical = torch.tensor([[0], [-1]])
    assert to_physical(torch.tensor([[0], [-1]]), physical).tolist() == [[0], [-1]]
    with pytest.raises(ValueError, match="logical expert 1 is routed to but has no physical replica"):
        to_physical(torch.tensor([[0], [1]]), physical)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_expert_load_counts_logical_routes_only(dtype: torch.dtype) -> None:
    ids = torch.tensor([[0, 1], [1, -1], [1, 3]], dtype=dtype)
    assert expert_load(ids, 4).tolist() == [1, 3, 0, 1]
    assert expert_load(ids[:0], 4).tolist() == [0, 0, 0, 0]
