"""Gathers of uneven rows and their sums in place of vLLM's, whose CPU groups have none; a plugin for tests alone.

With them vLLM's own all-gather and reduce-scatter exchange (``AgRsAll2AllManager``) runs between processes on CPUs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed


def register() -> None:
    """Add the two operations, in every process that vLLM starts."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = _all_gatherv
    CpuCommunicator.reduce_scatterv = _reduce_scatterv


def _all_gatherv(
    self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    """All ranks' rows, ``sizes[rank]`` of each, one after the other."""
    assert dim == 0
    if not isinstance(input_, Tensor):
        return [_all_gatherv(self, tensor, dim, sizes) for tensor in input_]  # type: ignore[misc]
    rows = sizes or [len(input_)] * self.world_size
    sent = input_.new_zeros(max(rows), *input_.shape[1:])  # gloo gathers equal shapes alone
    sent[: len(input_)] = input_
    found = [torch.empty_like(sent) for _ in rows]
    distributed.all_gather(found, sent, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(found, rows, strict=True)])


def _reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    """This rank's rows, summed over all ranks in float32."""
    assert dim == 0
    rows = sizes or [len(input_) // self.world_size] * self.world_size
    summed = input_.to(torch.float32)
    distributed.all_reduce(summed, group=self.device_group)
    start = sum(rows[: self.rank_in_group])
    return summed[start : start + rows[self.rank_in_group]].to(input_.dtype)
