"""Memory that all ranks of a group can write: torch's symmetric memory, or plain tensors for virtual ranks.

What lies in it and who may write when stands in :mod:`foldmoe.parallel.one_sided_kernels`.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from foldmoe.parallel.simulate import VirtualRanks
from foldmoe.parallel.transport import DistributedTransport, GroupError, Transport

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

HEADER = 1024
"""Bytes before the first half: one flag of 8 bytes a rank."""

MAX_RANKS = HEADER // 8

WAIT_SECONDS = 60.0
"""How long a kernel waits for another rank's flag: longer than a rank that compiles its first batch is behind."""


class Unavailable(RuntimeError):  # noqa: N818
    """Ranks of this group cannot write to each other's memory; the same reason on every rank."""


@dataclass(frozen=True, eq=False)
class Mailbox:
    """One rank's view of the group's memory.

    Args:
        rank: whose.
        peers: ``[R]`` int64 addresses of all ranks' allocations, as this device sees them.
        half: bytes of each half.
        state: ``[3]`` int64 on the device: exchanges so far, programs that are done, 1 + the rank that did not answer.
        alarm: ``[1]`` int64 in host memory that kernels write: state[2] without waiting for the device.
        limit: of a wait, in nanoseconds, or in polls where kernels have no clock.
        kept: what the addresses point into.
    """

    rank: int
    peers: Tensor
    half: int
    state: Tensor
    alarm: Tensor
    limit: int
    kept: Any = field(repr=False)

    @property
    def ranks(self) -> int:
        return len(self.peers)

    @property
    def clock(self) -> bool:
        """Whether kernels have one: CUDA's nanosecond timer."""
        return self.peers.is_cuda and torch.version.hip is None

    @property
    def dependent(self) -> bool:
        """Whether a kernel may be scheduled while the one before it ends (programmatic dependent launch)."""
        return dependent(self.peers.device)

    def check(self) -> None:
        """Look, without waiting for the device, whether a wait has ended in vain.

        Raises:
            GroupError: naming the rank that did not answer.
        """
        if lost := int(self.alarm[0]):
            raise GroupError(
                f"rank {self.rank} of {self.ranks}: rank {lost - 1} did not write its part of an exchange in time; it "
                "has left the group or hangs. Outputs since then are NaN; make a new group"
            )


@cache
def dependent(device: torch.device) -> bool:
    """Programmatic dependent launch: CUDA, sm_90 and later."""
    on_cuda = device.type == "cuda" and torch.version.hip is None
    return on_cuda and torch.cuda.get_device_capability(device) >= (9, 0)


_opened: dict[object, list[Mailbox]] = {}
"""By group: the largest so far, shared by all layers of the group, whose exchanges follow each other on one stream."""


def open_mailboxes(transport: Transport, nbytes: int, timeout: float = WAIT_SECONDS) -> list[Mailbox]:
    """A mailbox for each rank that is played here; every rank must call this, with the same arguments.

    Args:
        transport: the group.
        nbytes: that one exchange takes on one rank.
        timeout: seconds that a kernel waits for another rank.

    Raises:
        Unavailable: with the reason, on every rank.
    """
    half = -(-nbytes // 256) * 256
    group = transport.group if isinstance(transport, DistributedTransport) else transport
    key = (group or dist.group.WORLD, timeout)
    known = _opened.get(key)
    if known and known[0].half >= half:
        return known
    _agreed(transport, _obstacle(transport))
    if not isinstance(transport, VirtualRanks):
        _agreed(transport, _unreachable(transport))
    else:
        return [_mailbox(rank, tensors, half, timeout) for rank, tensors in _virtual(transport, half)]
    memory = _tried(transport, lambda: _allocated(half, transport.device))
    # Agreed on again: nobody writes before all have cleared their flags.
    rank = transport.ranks[0]
    box = _tried(transport, lambda: _mailbox(rank, _mapped(memory, group, transport), half, timeout))
    _opened[key] = [box]
    return [box]


def _tried(transport: Transport, step: Callable[[], T]) -> T:
    """What a step gives, once it has gone well on all ranks: the next one may wait for them.

    Raises:
        Unavailable: whatever a rank's memory, driver or torch raised.
    """
    done: list[T] = []
    problem = None
    try:
        done.append(step())
    except Exception as error:  # of any kind: raised here alone, it would leave the others waiting
        problem = f"torch's symmetric memory: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
    _agreed(transport, problem)
    return done[0]


def _agreed(transport: Transport, problem: str | None) -> None:
    """Raise everywhere what is in the way anywhere."""
    found = transport.gather_objects([problem] * len(transport.ranks))
    if reasons := [f"rank {rank}: {text}" for rank, text in enumerate(found) if text]:
        raise Unavailable(reasons[0])


def _obstacle(transport: Transport) -> str | None:
    if not 2 <= transport.size <= MAX_RANKS:
        return f"a group of {transport.size} ranks; mailboxes join 2 to {MAX_RANKS}"
    if find_spec("triton") is None:
        return "triton is not installed: pip install 'foldmoe[gpu]'"
    if isinstance(transport, VirtualRanks):
        from foldmoe.parallel.one_sided import INTERPRETED

        return None if transport.device.type == "cuda" or INTERPRETED else "CPUs have no kernels that write to peers"
    if transport.device.type != "cuda":
        return "the group has no GPUs (gloo)"
    return None if find_spec("torch.distributed._symmetric_memory") else f"torch {torch.__version__} has none"


def _allocated(half: int, device: torch.device) -> Tensor:
    """This rank's buffer, its flags cleared."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    memory = symmetric_memory.empty((HEADER + 2 * half,), dtype=torch.uint8, device=device)
    memory.zero_()
    torch.cuda.synchronize(device)
    return memory


def _mapped(memory: Tensor, group: Any, transport: Transport) -> list[Tensor]:
    """All ranks' buffers, by rank; every rank must call this, and waits for the others here."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    whole: Any = group or dist.group.WORLD
    handle = symmetric_memory.rendezvous(memory, whole)
    found = [handle.get_buffer(rank, memory.shape, torch.uint8) for rank in range(transport.size)]
    return [memory if rank == transport.ranks[0] else peer for rank, peer in enumerate(found)]


def _unreachable(transport: Transport) -> str | None:
    """Which GPU of the group this one cannot write to; looked at before anything is mapped."""
    device = transport.device
    mine = (platform.node(), str(torch.cuda.get_device_properties(device).uuid))
    others = transport.gather_objects([mine])
    here = {str(torch.cuda.get_device_properties(n).uuid): n for n in range(torch.cuda.device_count())}
    for rank, (node, uuid) in enumerate(others):
        if rank == transport.ranks[0]:
            continue
        if node != mine[0]:
            return f"rank {rank} is on another host ({node})"
        if uuid == mine[1]:
            return f"rank {rank} has the same GPU"
        if uuid in here and not torch.cuda.can_device_access_peer(device, here[uuid]):
            return f"its GPU cannot reach that of rank {rank} (no peer access)"
    return None


def _virtual(transport: VirtualRanks, half: int) -> list[tuple[int, list[Tensor]]]:
    tensors = [
        torch.zeros(HEADER + 2 * half, dtype=torch.uint8, device=transport.device) for _ in range(transport.size)
    ]
    return [(rank, tensors) for rank in transport.ranks]


def _mailbox(rank: int, buffers: Sequence[Tensor], half: int, timeout: float) -> Mailbox:
    device = buffers[rank].device
    on_gpu = device.type == "cuda"
    has_clock = on_gpu and torch.version.hip is None
    return Mailbox(
        rank,
        torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=device),
        half,
        torch.zeros(3, dtype=torch.int64, device=device),
        torch.zeros(1, dtype=torch.int64, pin_memory=on_gpu),
        int(timeout * (1e9 if has_clock else 1e6)),
        buffers,
    )
