"""The folded launch's own source as plain Python on CPU tensors: every warp role a thread, every barrier counted.

    run(arguments of folded_moe, ctas=2)

Functions keep their code and get other globals: ``gl``, ``mbarrier``, TMA and ``wgmma`` of this file. So a test sees
wrong units, scales, coordinates, byte counts and barrier phases, a deadlock (an error after ten seconds), a slot that
is freed before its product is done, two accesses in no order (``ordering.py``); not layouts or registers. Products are
exact sums.
"""

from __future__ import annotations

import threading
from math import prod
from types import FunctionType, SimpleNamespace

import torch
from triton.experimental.gluon import language
from triton.runtime.jit import JITFunction

from foldmoe.backends.hopper.kernels import copies, cut, epilogue, folded, products, tickets, whole
from tests.hopper import emulate, ordering

_change = threading.Condition()
_barriers: dict[int, Barrier] = {}
_errors: list[BaseException] = []
_PATIENCE = 10.0
DTYPES = {
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8e4nv": torch.float8_e4m3fn,
}


class Number(int):
    """A scalar that the device code converts."""

    def to(self, _dtype):
        return self


def _raw(value):
    return value.data if isinstance(value, Tensor) else value


class Tensor:
    """A register tensor; ``loads``: those from shared memory that its value is made of."""

    def __init__(self, data, loads=frozenset()):
        self.data, self.loads = data, loads
        self.shape = list(data.shape)
        self.type = SimpleNamespace(layout=None)

    def to(self, dtype, bitcast=False):
        if not bitcast:
            return Tensor(self.data.to(dtype), self.loads)
        whole = {torch.int32: self.data.dtype, torch.float32: torch.int32, torch.float8_e4m3fn: torch.uint8}[dtype]
        return Tensor(self.data.to(whole).view(dtype), self.loads)

    def expand_dims(self, axis):
        return Tensor(self.data.unsqueeze(axis), self.loads)

    def reshape(self, shape):
        return Tensor(self.data.reshape(shape), self.loads)

    def permute(self, order):
        return Tensor(self.data.permute(order), self.loads)

    def broadcast_to(self, shape):
        return Tensor(self.data.broadcast_to(shape), self.loads)

    def split(self):
        return Tensor(self.data[..., 0], self.loads), Tensor(self.data[..., 1], self.loads)


def _loads(*values):
    return frozenset().union(*(v.loads for v in values if isinstance(v, Tensor)))


def _operator(name):
    def apply(self, other):
        return Tensor(getattr(torch.Tensor, name)(self.data, _raw(other)), _loads(self, other))

    return apply


for _name in ("add", "radd", "sub", "mul", "rmul", "rshift", "lshift", "and", "floordiv", "mod", "lt", "gt"):
    setattr(Tensor, f"__{_name}__", _operator(f"__{_name}__"))
Tensor.__rsub__ = lambda self, other: Tensor(other - self.data)
Tensor.__neg__ = lambda self: Tensor(-self.data)


class Pointer:
    """Into a tensor's memory, element by element."""

    def __init__(self, memory, offset=0):
        self.memory, self.offset = memory, offset

    def __add__(self, other):
        return Pointer(self.memory, self.offset + _raw(other))


class Memory:
    """A piece of shared memory."""

    def __init__(self, data):
        self.data = data

    def index(self, i):
        return Memory(self.data[i])

    def slice(self, start, length, dim=0):
        return Memory(self.data.narrow(dim, start, length))

    def permute(self, order):
        return Memory(self.data.permute(order))

    def load(self, _layout):
        return Tensor(self.data.clone(), ordering.load_shared(self.data))

    def store(self, value):
        ordering.store_shared(self.data)
        self.data.copy_(_raw(value))

    def _reinterpret(self, dtype, shape, _layout):
        return Memory(self.data.view(dtype).view(shape))

    reinterpret = _reinterpret


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all announced bytes have come."""

    def __init__(self, count):
        self.count = self.pending = count
        self.bytes = self.phase = 0
        self.order = ordering.Phases()

    def update(self, arrivals, announced):
        self.pending -= arrivals
        self.bytes += announced
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.count
            self.phase ^= 1
            self.order.complete()


def _barrier(memory):
    return _barriers[memory.data.data_ptr()]


def _until(true):
    with _change:
        if not _change.wait_for(lambda: _errors or true(), _PATIENCE):
            raise TimeoutError("a warp role waits for ever")
        if _errors:
            raise SystemExit


def _update(memory, arrivals, announced):
    with _change:
        barrier = _barrier(memory)
        if arrivals:
            barrier.order.arrive()
        barrier.update(arrivals, announced)
        _change.notify_all()


def _wait(memory, phase):
    _until(lambda: _barrier(memory).phase != phase)
    _barrier(memory).order.wait()


mbarrier = SimpleNamespace(
    init=lambda memory, count: _barriers.__setitem__(memory.data.data_ptr(), Barrier(count)),
    wait=_wait,
    arrive=lambda memory, count: _update(memory, count, 0),
    expect=lambda memory, size: _update(memory, 1, size),
    MBarrierLayout=lambda: None,
)


_here = threading.local()
"""``warps`` of the role that runs in a thread."""


def _arrive_all(memory, increment_count):
    """Every thread, once its copies are over; it copies nothing."""
    assert not increment_count
    _update(memory, 32 * _here.warps, 0)


async_copy = SimpleNamespace(mbarrier_arrive=_arrive_all)


def tma_load(descriptor, at, barrier, destination):
    """A box; what lies outside the tensor is zero."""
    box, item = descriptor.block_shape, descriptor.base.element_size()
    assert list(destination.data.shape) == list(box), (destination.data.shape, box)
    assert at[1] * item % 16 == 0, "TMA reads from multiples of 16 bytes"
    whole = descriptor.base.as_strided(descriptor.shape, descriptor.strides)
    part = whole[at[0] : at[0] + box[0], at[1] : at[1] + box[1]]
    part = ordering.copy(part, destination.data, _barrier(barrier).order)
    destination.data.view(torch.uint8).zero_()
    destination.data[: part.shape[0], : part.shape[1]] = part
    _update(barrier, 0, -destination.data.numel() * item)


def warpgroup_mma(a, b, acc, use_acc=True, is_async=False):
    """The operands, read when the product is waited for: until then their slot must not be written again."""
    assert is_async
    ordering.begin_product([m.data for m in (a, b) if isinstance(m, Memory)], _loads(a))
    return SimpleNamespace(a=a, b=b, acc=acc if use_acc else None)


def _product(p):
    if isinstance(p, Tensor):
        return p
    before = 0.0 if p.acc is None else _product(p.acc).data.double()
    return Tensor((before + p.a.data.double() @ p.b.data.double()).float())


def warpgroup_mma_wait(left, deps):
    ordering.end_products(left)
    done = [_product(p) for p in deps]
    return done[0] if len(done) == 1 else tuple(done)


def _asm(text, _constraints, arguments, dtype, is_pure, pack):
    if "ex2.approx" in text:
        x = arguments[0].data
        return Tensor(x * torch.sigmoid(x), _loads(*arguments))
    if "prmt.b32" in text:
        q, low, high = arguments
        word = sum(q.data[..., i].long() << (8 * i) for i in range(4))
        low, high = (half.data[..., 0].long().expand(word.shape) for half in (low, high))
        eight = emulate.select(word, low, high).to(torch.uint8)
        return Tensor(eight[..., :4], _loads(*arguments)), Tensor(eight[..., 4:], _loads(*arguments))
    if "prefetch" in text:
        return None
    if "ld.acquire" in text:
        counter, wanted = arguments[:2]
        _until(lambda: int(counter.memory[counter.offset]) >= wanted)
        ordering.counted(counter.memory, counter.offset)
        return Number(0)
    if "fence.proxy.async.global" in text:
        ordering.fence_stores()
    assert "mov.b32 $0, $1" in text, text
    return arguments[0] if isinstance(arguments[0], Tensor) else Number(arguments[0])


def _load(pointer, mask=None, other=0):
    if isinstance(pointer.offset, int):
        value = pointer.memory[pointer.offset].item()
        return Number(value) if isinstance(value, int) else value
    if mask is None:
        ordering.load_global(pointer.memory, pointer.offset)
        return Tensor(pointer.memory[pointer.offset])
    ordering.load_global(pointer.memory, pointer.offset[mask.data.expand(pointer.offset.shape)])
    found = pointer.memory[torch.where(mask.data, pointer.offset, 0)]
    return Tensor(torch.where(mask.data, found, other))


def _store(pointer, value, mask=None):
    offset, data = torch.broadcast_tensors(pointer.offset, _raw(value).to(pointer.memory.dtype))
    keep = torch.ones_like(offset, dtype=torch.bool) if mask is None else mask.data.expand(offset.shape)
    ordering.store_global(pointer.memory, offset[keep])
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[data.element_size()]  # no NaN is changed on the way
    pointer.memory.view(bits)[offset[keep]] = data[keep].view(bits)


def _atomic_add(pointer, value, sem, scope):
    with _change:
        if sem == "release":
            ordering.count_up(pointer.memory, pointer.offset)
        before = int(pointer.memory[pointer.offset])
        pointer.memory[pointer.offset] += value
        _change.notify_all()
    return Number(before)


def _where(condition, a, b):
    if isinstance(condition, (bool, int)):
        return a if condition else b
    return Tensor(torch.where(condition.data, _raw(a), _raw(b)), _loads(condition, a, b))


def _max(x, axis):
    top = x.data.amax(axis)
    return Tensor(top, x.loads) if top.ndim else Number(top)


def _extreme(with_nan, numbers, scalar):
    def apply(a, b, propagate_nan=None):
        if isinstance(a, Tensor):
            function = numbers if propagate_nan is None else with_nan
            return Tensor(function(a.data, torch.as_tensor(_raw(b), dtype=a.data.dtype)), _loads(a, b))
        return scalar(a, b)

    return apply


def _guarded(parent, warps, function, arguments):
    ordering.begin(parent)
    _here.warps = warps
    try:
        function(*arguments)
    except SystemExit:
        pass
    except BaseException as error:
        with _change:
            _errors.append(error)
            _change.notify_all()


def _together(calls, warps):
    given = zip(warps, calls, strict=True)
    threads = [threading.Thread(target=_guarded, args=(ordering.here(), n, *call), daemon=True) for n, call in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Language:
    """``gl``: what the kernels use of it; layouts are nothing."""

    float = float
    where = staticmethod(_where)
    load = staticmethod(_load)
    store = staticmethod(_store)
    atomic_add = staticmethod(_atomic_add)
    maximum = staticmethod(_extreme(torch.maximum, torch.fmax, max))
    minimum = staticmethod(_extreme(torch.minimum, torch.fmin, min))
    max = staticmethod(_max)
    inline_asm_elementwise = staticmethod(_asm)
    static_range = range
    num_programs = staticmethod(lambda axis: 132)  # fewer may run: the others would come once one of these ends
    abs = staticmethod(lambda x: Tensor(x.data.abs(), x.loads))
    arange = staticmethod(lambda start, end, layout=None: Tensor(torch.arange(start, end)))
    zeros = staticmethod(lambda shape, dtype, layout: Tensor(torch.zeros(shape, dtype=dtype)))
    full = staticmethod(lambda shape, value, dtype, layout: Tensor(torch.full(shape, int(value), dtype=dtype)))
    join = staticmethod(lambda a, b: Tensor(torch.stack((a.data, b.data), -1), _loads(a, b)))
    convert_layout = staticmethod(lambda value, layout, assert_trivial=False: value)
    warp_specialize = staticmethod(lambda roles, warps, registers: _together(roles, [4, *warps]))

    @staticmethod
    def allocate_shared_memory(dtype, shape, _layout):
        memory = torch.full((prod(shape) * dtype.itemsize,), 255, dtype=torch.uint8)
        ordering.allocated(memory)
        return Memory(memory.view(dtype).view(shape))

    def __getattr__(self, name):
        return DTYPES.get(name) or (lambda *_, **__: None)


def namespace(others=()):
    """Globals of all kernel modules together, device functions as plain ones; ``others`` in place of some."""
    names = {}
    for module in (tickets, copies, cut, products, epilogue, whole, folded):
        names.update(vars(module))
    names.update(gl=Language(), mbarrier=mbarrier, async_copy=async_copy, tma_load=tma_load, barrier=lambda: None)
    names["fence_async_shared"] = ordering.end_all_loads
    names.update(warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait)
    for name, value in names.items():
        if isinstance(value, JITFunction):
            names[name] = FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
        elif isinstance(value, language.constexpr):
            names[name] = value.value
    return names.update(others) or names


def run(arguments, *, ctas=2, others=()):
    """``folded_moe(*arguments)`` on ``ctas`` CTAs, with ``others`` (by name) in place of some of its functions.

    Raises:
        TimeoutError: a role that waited ten seconds. AssertionError: a breach of TMA's or a barrier's rules, or
            accesses in no order.
    """
    _barriers.clear()
    _errors.clear()
    ordering.reset()
    kernel = namespace(others)["folded_moe"]
    given = [Pointer(a.view(-1)) if isinstance(a, torch.Tensor) else a for a in arguments]
    _together([(kernel, given)] * ctas, [4] * ctas)
    if _errors:
        raise _errors[0]
