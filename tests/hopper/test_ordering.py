"""A launch with one hand-over taken out is out of order (``ordering.py``); ``test_launch.py`` runs it as it is."""

from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="NOT CHECKED: the Hopper launch needs triton (pip install foldmoe[gpu])")

from foldmoe.backends.hopper import heuristics, workspace
from foldmoe.backends.hopper.packing import pack_layer
from foldmoe.moe import Activation
from tests.hopper import plain_gluon
from tests.hopper.ordering import OutOfOrderError
from tests.hopper.test_launch import EXPERTS, TOP_K, launch
from tests.support.cases import random_case
from tests.triton.support import LIMIT, weights

WHOLE, MIXED = "fp8-fp8_32", "mxfp4-fp8"


def run(pair, **others):
    """Few columns and many tiles, so that every ring goes round more than once."""
    clamp = Activation(LIMIT)
    layer = pack_layer(*weights(pair, EXPERTS, 192, 128, 384), clamp, clamp)
    config = heuristics.build(layer.geometry, 8, 16, 4 if pair == MIXED else 2)
    return launch(layer, random_case(40, TOP_K, EXPERTS, 384), config, others=others)


def real(name, **others):
    return plain_gluon.namespace(others)[name]


@pytest.mark.parametrize("pair", [MIXED, WHOLE])
def test_as_it_is(pair):
    assert run(pair).isfinite().all()


@pytest.mark.parametrize("pair", [MIXED, WHOLE])
def test_a_slot_released_before_its_scales_are_read(pair):
    """A race that once was: an arrival at a barrier does not wait for loads, and copies do not either."""
    with pytest.raises(OutOfOrderError, match="a copy of bytes that another warp role may still read"):
        run(pair, finish_reads=lambda: None)


@pytest.mark.parametrize("pair", [MIXED, WHOLE])
def test_a_slot_released_before_its_product_is_over(pair):
    with pytest.raises(OutOfOrderError, match="a copy of bytes that another warp role may still read"):
        run(pair, warpgroup_mma_wait=lambda left, deps: plain_gluon.warpgroup_mma_wait(left + 1, deps))


def test_a_ticket_released_before_it_is_read():
    def hasty(tickets, slot, phase, warps):
        _values, full, empty = tickets
        plain_gluon.mbarrier.wait(full.index(slot), phase)
        plain_gluon.async_copy.mbarrier_arrive(empty.index(slot), increment_count=False)
        passed = {"mbarrier": SimpleNamespace(wait=lambda *_: None)}
        passed["async_copy"] = SimpleNamespace(mbarrier_arrive=lambda *_, **__: None)
        return real("receive", **passed)(tickets, slot, phase, warps)

    with pytest.raises(OutOfOrderError, match="a store of bytes that another warp role may still read"):
        run(MIXED, receive=hasty)


def test_a_ticket_announced_before_it_is_written():
    def hasty(tickets, slot, phase, ticket):
        values, full, empty = tickets
        plain_gluon.mbarrier.wait(empty.index(slot), phase)
        plain_gluon.mbarrier.arrive(full.index(slot), count=1)
        plain_gluon.async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        values.index(slot).store(ticket)
        return real("advance")(slot, phase, 4)

    with pytest.raises(OutOfOrderError, match=r"whose last write is not known to be over|may still read"):
        run(MIXED, hand_out=hasty)


class OneHalf:
    """Largest values in one buffer where there are two in turn."""

    def __init__(self, memory, warpgroups):
        self.memory, self.warpgroups = memory, warpgroups

    def index(self, i):
        return self.memory.index(i % self.warpgroups)


def test_largest_values_overwritten_while_others_read_them():
    def finish_up(parts, out, at, exchange, *rest):
        turn, buffers, full = exchange
        return real("finish_up")(parts, out, at, (turn, OneHalf(buffers, rest[-1].warpgroups), full), *rest)

    with pytest.raises(OutOfOrderError):
        run(MIXED, finish_up=finish_up)


def test_products_of_a_cut_tile_added_up_before_others_have_kept_theirs():
    clamp = Activation(LIMIT)
    layer = pack_layer(*weights("mxfp4-fp8_e8m0", EXPERTS, 192, 128, 1152), clamp, clamp)
    config = heuristics.build(layer.geometry, 8, 8, 4, parts=heuristics.PARTS)
    case = random_case(2, TOP_K, EXPERTS, 1152)
    assert launch(layer, case, config).isfinite().all()

    def hasty(counter, wanted, error, ticket):
        if counter.offset >= workspace.HEAD:
            real("wait_for")(counter, wanted, error, ticket)

    with pytest.raises(OutOfOrderError, match="a load of bytes whose last write is not known to be over"):
        launch(layer, case, config, others={"wait_for": hasty})


@pytest.mark.parametrize("missing", ["for_copies", "count_stored"])
def test_hidden_vectors_copied_before_they_are_stored(missing):
    """What is copied out of order is NaN. Without the fence; and with a count that does not release."""

    def relaxed(done, counter):
        plain_gluon.Language.atomic_add(done + counter, 1, sem="relaxed", scope="gpu")

    replaced = relaxed if missing == "count_stored" else lambda block: None
    assert run(MIXED, **{missing: replaced}).isnan().any()
