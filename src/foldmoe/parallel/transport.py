"""Collectives that dispatch and combine need, over a torch process group.

A transport plays one rank or several: a process of a real group plays its own, a simulation all of them. Arguments and
results are therefore lists with one entry for each rank that is played here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from foldmoe.parallel.wire import as_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class GroupError(RuntimeError):
    """A collective did not complete: another rank is gone, or did not answer in the group's timeout.

    Over gloo. NCCL's calls return before they are done: there torch's watchdog ends the process at the timeout, unless
    ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` says otherwise.
    """


@runtime_checkable
class Transport(Protocol):
    """What carries rows between ranks. Every rank makes the same calls in the same order."""

    @property
    def size(self) -> int:
        """Ranks of the group."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that are played here, in order."""

    @property
    def device(self) -> torch.device:
        """Where the few numbers lie that ranks exchange beside tokens."""

    def all_gather(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """``[N, ...]`` of every rank, N the same on all, to ``[R, N, ...]``."""

    def all_to_all(
        self, rows: Sequence[Tensor], sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Rows sorted by destination to rows sorted by source.

        Args:
            rows: ``[sum of sent, ...]`` each.
            sent, received: rows to and from every rank.
        """

    def gather_objects(self, objects: Sequence[object]) -> list[Any]:
        """One object of every rank, in order of rank; for facts at load, not for tokens."""


class DistributedTransport:
    """``torch.distributed``: gloo on CPUs, NCCL on GPUs.

    Args:
        group: the process group; the default one if None. One with both, as ``init_process_group()`` makes it where no
            backend is named, is for GPUs where there are any: name gloo for layers on CPUs beside them.

    Raises:
        ValueError: a group that this process is no member of.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError("this process is no member of the group; only a group's own ranks build its layers")
        backends = dist.get_backend_config(group).split(",")  # get_backend says "undefined" where none was named
        self._on_gpus = "cuda:nccl" in backends and torch.cuda.is_available()

    @property
    def size(self) -> int:
        return self._size

    @property
    def ranks(self) -> tuple[int, ...]:
        return (self.rank,)

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if self._on_gpus else torch.device("cpu")

    def all_gather(self, rows: Sequence[Tensor]) -> list[Tensor]:
        (mine,) = rows
        out = mine.new_empty(self.size * len(mine), *mine.shape[1:])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
        self._run("all-gather", lambda: gather(_bytes(out), _bytes(mine), group=self.group))
        return [out.unflatten(0, (self.size, len(mine)))]

    def all_to_all(
        self, rows: Sequence[Tensor], sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        (mine,), (to,), (coming,) = rows, sent, received
        out = mine.new_empty(sum(coming), *mine.shape[1:])
        self._run(
            "all-to-all",
            lambda: dist.all_to_all_single(_bytes(out), _bytes(mine), list(coming), list(to), group=self.group),
        )
        return [out]

    def gather_objects(self, objects: Sequence[object]) -> list[Any]:
        found: list[Any] = [None] * self.size
        self._run("exchange of facts", lambda: dist.all_gather_object(found, objects[0], group=self.group))
        return found

    def _run(self, what: str, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            raise GroupError(
                f"rank {self.rank} of {self.size}: the {what} failed: another rank has left the group, or did not "
                f"answer within the group's timeout ({error})"
            ) from error


def _bytes(rows: Tensor) -> Tensor:
    """``[N, bytes]`` uint8 over the same memory: gloo does not know every dtype, and no collective here adds."""
    return as_bytes(rows) if rows.dim() > 1 else rows.contiguous()


def as_transport(group: Transport | dist.ProcessGroup | None) -> Transport:
    """A transport as it is; a process group (None: the default one) wrapped."""
    if group is not None and isinstance(group, Transport):
        return group
    return DistributedTransport(group)
