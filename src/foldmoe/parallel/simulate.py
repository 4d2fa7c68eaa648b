"""R virtual ranks in one process, on one device: the same dispatch and combine, over views of one buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


def simulate(ranks: int, device: torch.device | str = "cpu") -> VirtualRanks:
    """A group of virtual ranks, to be given to :class:`foldmoe.parallel.ExpertParallelMoE` with one layer each.

    Args:
        ranks: R.
        device: the one that all layers and tokens are on.

    Raises:
        ValueError: below one rank.
    """
    return VirtualRanks(ranks, torch.device(device))


class VirtualRanks:
    """Plays all ranks. Deterministic: nothing runs at the same time, nothing waits.

    ``moved[source, destination]`` counts the bytes that would have crossed between two ranks.
    """

    def __init__(self, ranks: int, device: torch.device) -> None:
        if ranks < 1:
            raise ValueError(f"a group has at least one rank, found {ranks}")
        self._size = ranks
        self._device = device
        self.moved = torch.zeros(ranks, ranks, dtype=torch.int64)

    @property
    def size(self) -> int:
        return self._size

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self._size))

    @property
    def device(self) -> torch.device:
        return self._device

    def all_gather(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """One buffer ``[R, N, ...]``, which every rank sees."""
        shapes = {tuple(part.shape) for part in rows}
        if len(rows) != self.size or len(shapes) != 1:
            raise ValueError(f"an all-gather over {self.size} ranks needs as many equal parts, found {sorted(shapes)}")
        buffer = torch.stack(list(rows))
        self._count([[part.nbytes] * self.size for part in rows])
        return [buffer] * self.size

    def all_to_all(
        self, rows: Sequence[Tensor], sent: Sequence[Sequence[int]], received: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """One buffer sorted by destination, then source; every rank sees its own range."""
        if [list(column) for column in zip(*sent, strict=True)] != [list(counts) for counts in received]:
            raise ValueError(f"ranks send {list(sent)} but expect {list(received)}: a real group would hang here")
        parts = [part.split(list(counts)) for part, counts in zip(rows, sent, strict=True)]
        buffer = torch.cat([parts[source][to] for to in range(self.size) for source in range(self.size)])
        width = rows[0][:1].nbytes if len(rows[0]) else rows[0].new_empty(1, *rows[0].shape[1:]).nbytes
        self._count([[count * width for count in counts] for counts in sent])
        return list(buffer.split([sum(counts) for counts in received]))

    def gather_objects(self, objects: Sequence[object]) -> list[Any]:
        return list(objects)

    def _count(self, nbytes: list[list[int]]) -> None:
        moved = torch.tensor(nbytes)
        self.moved += moved.fill_diagonal_(0)
