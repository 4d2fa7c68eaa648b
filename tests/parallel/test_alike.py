"""Kernels and tiles of a local launch follow from what all ranks know, not from what reached one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from foldmoe.parallel import moe as parallel_moe
from foldmoe.parallel import simulate
from tests.parallel.support import TOP_K, crowd, deal, make_case, virtual, weights_of

if TYPE_CHECKING:
    from foldmoe.backends import Call

COUNTS = [6, 0, 3]


@pytest.mark.parametrize("options", [{}, {"strategy": "all_to_all"}, {"strategy": "all_to_all", "order": "route"}])
@pytest.mark.parametrize("fold", ["native", "slot"])
def test_all_ranks_choose_for_the_same_rows(
    fold: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Call] = []
    run_planned = parallel_moe.run_planned

    def watched(layer: Any, plan: Any, call: Call, rows: int) -> Any:
        calls.append(call)
        return run_planned(layer, plan, call, rows)

    monkeypatch.setattr(parallel_moe, "run_planned", watched)
    moe = virtual(weights_of(9), simulate(3), fold, **options)
    case = make_case(9, 9, dtype=torch.bfloat16)
    for favourite in range(3):  # every token's experts are on this rank
        moe.forward_ranks(deal(crowd(case, 9, 3, favourite), COUNTS))
    arrived = [len(call.x) for call in calls]
    assert len(set(arrived)) > 1 or not options
    most = 3 * 6 * TOP_K + 6 if "order" in options else 3 * 6
    assert {call.sized_for for call in calls} == {most}
    assert max(arrived) <= most
