"""Up tiles whose K is cut into parts, each a CTA's: where tiles are few, their CTAs alone would read all weights.

That is so with one token or two on a rank that holds a part of every expert's width. A CTA keeps the product of every K
step of its part, times its scales, which are powers of two and change no bits. The CTA with a tile's last part, whose
ticket is the largest, waits for the others and adds all products in the order in which one CTA alone adds: the same
bits, and no order of parts that a batch could change.

A step's product of 64 rows and 8 tokens lies as ``[pair of tokens, warp and row, half, token]``: a thread's 16 bytes,
and pairs of tokens that a tile does not have are neither written nor read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from foldmoe.backends.hopper import batch
from foldmoe.backends.hopper.kernels.epilogue import count_stored
from foldmoe.backends.hopper.kernels.tickets import CUT_TILES, MET, late, wait_for

_SHARED = gl.constexpr(batch.SHARED)

STEP = gl.constexpr(4 * 512)
"""Numbers from a K step's products to the next one's: of four units of 64 rows."""

_AT_ONCE = gl.constexpr(8)
"""Steps whose products are loaded together: loads that wait for each other would take longer than all of K."""


@gluon.jit
def place(number, part, parts, most, run, products, control, error, ticket):
    """What a tile's functions need to know of its part: ticket ``ticket`` is part ``part`` of tile ``number``.

    Launches of shared and of routed tiles may run side by side, so that their products lie apart.
    """
    number += gl.where(run == _SHARED, CUT_TILES, 0)
    return number, part, parts, most, products, control, error, ticket


@gluon.jit
def this_part(cutting, up, k_up, rows, WG: gl.constexpr, C: gl.constexpr):
    """K steps of an up tile's part; where the first one's product is kept, and of how many tokens."""
    number, part, parts, most, products, _control, _error, _ticket = cutting
    STEPS: gl.constexpr = C.routed_steps[0]
    first = part * most
    at = products + ((number * STEPS + first) * 4 + WG) * 512
    return gl.minimum(most, k_up - first), (at, gl.where(up & (parts > 1), rows, 0))


@gluon.jit
def _as_threads(product):
    return product.reshape([4, 2, 8, 4, 2]).permute((3, 0, 2, 1, 4)).reshape([4, 32, 4])


@gluon.jit
def _places(rows, layout: gl.constexpr):
    """Offsets of a step's numbers, and which of them belong to one of so many tokens."""
    pair = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, layout))).expand_dims(1).expand_dims(2)
    row = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, layout))).expand_dims(0).expand_dims(2)
    four = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, layout))).expand_dims(0).expand_dims(1)
    return late(pair * 32 + row) * 4 + four, pair * 2 < rows


@gluon.jit
def keep(product, at, rows):
    """Store a step's product of a warpgroup's 64 rows."""
    numbers = _as_threads(product)
    LAYOUT: gl.constexpr = numbers.type.layout
    offsets, there = _places(rows, LAYOUT)
    gl.store(at + offsets, numbers, mask=there)


@gluon.jit
def _sum(like, at, steps, rows):
    """All steps' products, in order; in the layout of ``like``."""
    MMA: gl.constexpr = like.type.layout
    acc = _as_threads(gl.zeros([64, 8], gl.float32, MMA))
    LAYOUT: gl.constexpr = acc.type.layout
    offsets, _there = _places(rows, LAYOUT)
    at += offsets
    for begin in range(0, steps, _AT_ONCE):
        products = ()
        for i in gl.static_range(_AT_ONCE):
            _offsets, there = _places(gl.where(begin + i < steps, rows, 0), LAYOUT)
            products += (gl.load(at + i * STEP, mask=there, other=0.0),)
        for i in gl.static_range(_AT_ONCE):
            acc += products[i]
        at += _AT_ONCE * STEP
    acc = acc.reshape([4, 4, 8, 2, 2]).permute((1, 3, 2, 0, 4)).reshape([64, 8])
    return gl.convert_layout(acc, MMA, assert_trivial=True)


@gluon.jit
def meet(acc, tile, cutting, k_up, WG: gl.constexpr, C: gl.constexpr):
    """An up tile's sums over all of K, and whether this part is the one that has them."""
    number, part, parts, _most, products, control, error, ticket = cutting
    _up, _expert, _block, _row, rows, _counter = tile
    last = part == parts - 1
    if parts > 1:
        counter = MET + number * 4 + WG
        count_stored(control, counter)
        if last:
            wait_for(control + counter, parts, error, ticket)
            STEPS: gl.constexpr = C.routed_steps[0]
            acc = _sum(acc, products + (number * STEPS * 4 + WG) * 512, k_up, rows)
    return acc, last
