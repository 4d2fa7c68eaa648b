"""Whether accesses of the folded launch are in order: vector clocks over ``plain_gluon.py``'s threads and barriers.

An access must come after every conflicting one by another warp role: barriers, counters and the start of the roles
order them, that threads happened to run so does not. Bulk copies (TMA) and products (wgmma) count as what they are:

- a copy into shared memory ends with its barrier's phase, and is read after a wait for that;
- a product reads its operands until it is waited for;
- a thread's load is over, for a copy over what it reads, once a product of its value is waited for or a
  ``fence_async_shared`` has followed it: an arrival at a barrier does not wait for a load;
- what is stored to global memory is loaded after the counter that says so, and copied after ``fence.proxy.async`` on
  both sides.

A breach is an :class:`OutOfOrderError`, but for the last: a tile's copies reach over rows of others, whose results
nobody keeps, so what they bring out of order is NaN. Not seen: what threads of one warp role do among each other,
which is the compiler's.
"""

from __future__ import annotations

import threading
from collections import Counter
from itertools import count

import numpy as np
import torch

_NEVER = np.iinfo(np.int64).max
_lock = threading.RLock()
_agents = count(1)
_here = threading.local()


class OutOfOrderError(AssertionError):
    """Two accesses of which nothing says which comes first."""


class Clock(Counter[int]):
    """How much of every agent's work is known to be over."""

    def join(self, other: Clock) -> None:
        for agent, time in other.items():
            self[agent] = max(self[agent], time)


class Role:
    """A warp role: an agent whose time goes on with everything that it publishes."""

    def __init__(self, parent: Role | None = None):
        self.agent = next(_agents)
        self.known, self.fenced = Clock({self.agent: _NEVER}), Clock()
        if parent:
            self.known.join(parent.publish())
        self.time = 1
        self.loads: dict[int, tuple[_Shadow, object]] = {}
        self.products: list[tuple[list[torch.Tensor], frozenset[int]]] = []
        self.stores: list[tuple[_Shadow, object]] = []

    def publish(self) -> Clock:
        """What whoever waits for this will know."""
        known = Clock(self.known)
        known[self.agent] = self.time
        self.time += 1
        return known

    def end_loads(self, ids) -> None:
        """These loads have their values."""
        for one in ids:
            if found := self.loads.pop(one, None):
                shadow, where = found
                shadow.reads_of(self)[1][where] = self.time
        for shadow, where in self.loads.values():
            shadow.reads_of(self)[1][where] = _NEVER


class _Shadow:
    """Who last touched each byte of a tensor's memory, and when.

    Reads have two times: when they were issued, and when they were over.
    """

    def __init__(self, size: int):
        self.writer, self.written, self.fenced = (np.zeros(size, np.int64) for _ in range(3))
        self.reads: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def reads_of(self, role: Role) -> tuple[np.ndarray, np.ndarray]:
        if role.agent not in self.reads:
            self.reads[role.agent] = np.zeros_like(self.writer), np.zeros_like(self.writer)
        return self.reads[role.agent]

    def unknown(self, where, known: Clock, times: np.ndarray) -> np.ndarray:
        """Which of these bytes' last writes are not known to be over."""
        writers, times = self.writer[where], times[where]
        late = np.zeros(writers.shape, bool)
        for agent in np.unique(writers):
            late |= (writers == agent) & (times > known[int(agent)])
        return late

    def after_writes(self, where, known: Clock, what: str) -> None:
        if self.unknown(where, known, self.written).any():
            raise OutOfOrderError(f"{what} of bytes whose last write is not known to be over")

    def after_reads(self, where, role: Role, what: str, over: bool) -> None:
        for agent, times in self.reads.items():
            if agent != role.agent and (times[over][where] > role.known[agent]).any():
                raise OutOfOrderError(f"{what} of bytes that another warp role may still read")


_shadows: dict[int, _Shadow] = {}
_counters: dict[tuple[int, int], Clock] = {}


def reset() -> None:
    """Forget everything; the calling thread is no role."""
    _shadows.clear()
    _counters.clear()
    _here.role = None


def here() -> Role:
    """The calling thread's role."""
    if getattr(_here, "role", None) is None:
        _here.role = Role()
    return _here.role


def begin(parent: Role) -> None:
    """The calling thread starts as a role that knows what its parent knew."""
    with _lock:
        _here.role = Role(parent)


def allocated(tensor: torch.Tensor) -> None:
    """New memory, though something may have been there before."""
    with _lock:
        _shadows.pop(tensor.untyped_storage().data_ptr(), None)


def _shadow(tensor: torch.Tensor) -> _Shadow:
    storage = tensor.untyped_storage()
    key = storage.data_ptr()
    if key not in _shadows:
        _shadows[key] = _Shadow(storage.nbytes())
    return _shadows[key]


def _bytes(tensor: torch.Tensor):
    """Where a view lies in its memory: a range, or the number of every byte."""
    size, start = tensor.element_size(), tensor.storage_offset() * tensor.element_size()
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if span == tensor.numel():
        return slice(start, start + span * size)
    at = np.zeros((), np.int64)
    for n, stride in zip((*tensor.shape, size), (*(s * size for s in tensor.stride()), 1), strict=True):
        at = at[..., None] + np.arange(n) * stride
    return start + at.reshape(-1)


def _elements(memory: torch.Tensor, offsets: torch.Tensor):
    size = memory.element_size()
    first = (memory.storage_offset() + offsets.reshape(-1).numpy()) * size
    return (first[:, None] + np.arange(size)).reshape(-1)


def load_shared(tensor: torch.Tensor) -> frozenset[int]:
    """A role's load; what its value is made of, for :func:`begin_product`."""
    with _lock:
        role, shadow, where, one = here(), _shadow(tensor), _bytes(tensor), next(_agents)
        shadow.after_writes(where, role.known, "a load")
        issued, over = shadow.reads_of(role)
        issued[where], over[where] = role.time, _NEVER
        role.loads[one] = shadow, where
        return frozenset({one})


def store_shared(tensor: torch.Tensor) -> None:
    with _lock:
        role, shadow, where = here(), _shadow(tensor), _bytes(tensor)
        shadow.after_writes(where, role.known, "a store")
        shadow.after_reads(where, role, "a store", over=False)
        shadow.writer[where], shadow.written[where] = role.agent, role.time


def copy(source: torch.Tensor, destination: torch.Tensor, barrier: Phases) -> torch.Tensor:
    """A bulk copy that the calling role issues: what it brings of ``source``."""
    with _lock:
        role = here()
        brought = source.clone(memory_format=torch.contiguous_format)
        if (key := source.untyped_storage().data_ptr()) in _shadows:
            late = _shadows[key].unknown(_bytes(source), role.fenced, _shadows[key].fenced)
            brought.view(-1).view(torch.uint8)[torch.from_numpy(late)] = 0xFF
        shadow, where = _shadow(destination), _bytes(destination)
        shadow.after_writes(where, role.known, "a copy")
        shadow.after_reads(where, role, "a copy", over=True)
        shadow.writer[where], shadow.written[where] = barrier.agent, barrier.completed + 1
        return brought


def begin_product(operands: list[torch.Tensor], loads: frozenset[int]) -> None:
    """``operands`` in shared memory, and the loads that those in registers are made of."""
    with _lock:
        role = here()
        for tensor in operands:
            shadow, where = _shadow(tensor), _bytes(tensor)
            shadow.after_writes(where, role.known, "a product")
            for times in shadow.reads_of(role):
                times[where] = _NEVER
        role.products.append((operands, loads))


def end_products(left: int) -> None:
    """All but the last ``left`` are over."""
    with _lock:
        role = here()
        done, role.products = role.products[: len(role.products) - left], role.products[len(role.products) - left :]
        for operands, loads in done:
            for tensor in operands:
                for times in _shadow(tensor).reads_of(role):
                    times[_bytes(tensor)] = role.time
            role.end_loads(loads)
        for operands, _loads in role.products:
            for tensor in operands:
                for times in _shadow(tensor).reads_of(role):
                    times[_bytes(tensor)] = _NEVER


def end_all_loads() -> None:
    with _lock:
        here().end_loads(list(here().loads))


def store_global(memory: torch.Tensor, offsets: torch.Tensor) -> None:
    """One element a thread, ``offsets`` into ``memory``."""
    with _lock:
        role, shadow, where = here(), _shadow(memory), _elements(memory, offsets)
        shadow.after_writes(where, role.known, "a store")
        shadow.writer[where], shadow.written[where], shadow.fenced[where] = role.agent, role.time, _NEVER
        role.stores.append((shadow, where))


def load_global(memory: torch.Tensor, offsets: torch.Tensor) -> None:
    """Of memory that a role may have stored to."""
    with _lock:
        if (key := memory.untyped_storage().data_ptr()) in _shadows:
            _shadows[key].after_writes(_elements(memory, offsets), here().known, "a load")


def fence_stores() -> None:
    """``fence.proxy.async.global`` after stores."""
    with _lock:
        role = here()
        for shadow, where in role.stores:
            shadow.fenced[where] = role.time
        role.stores.clear()


def count_up(memory: torch.Tensor, offset: int) -> None:
    """``atomic_add`` with release."""
    with _lock:
        _counters.setdefault((memory.data_ptr(), offset), Clock()).join(here().publish())


def counted(memory: torch.Tensor, offset: int) -> None:
    """The wait for a counter, which ends in ``fence.proxy.async.global``."""
    with _lock:
        role = here()
        role.known.join(_counters.get((memory.data_ptr(), offset), Clock()))
        role.fenced = Clock(role.known)


class Phases:
    """What an mbarrier's waits hand on: everything that arrived in the phase waited for, and its copies."""

    def __init__(self):
        self.agent, self.completed = next(_agents), 0
        self.gathered, self.handed = Clock(), Clock()

    def arrive(self) -> None:
        with _lock:
            self.gathered.join(here().publish())

    def complete(self) -> None:
        with _lock:
            self.completed += 1
            self.handed, self.gathered = self.gathered, Clock()
            self.handed[self.agent] = self.completed

    def wait(self) -> None:
        with _lock:
            here().known.join(self.handed)
