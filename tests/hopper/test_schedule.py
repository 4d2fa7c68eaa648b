"""The ticket order never deadlocks: a Python model of CTAs, rings and counters, one CTA to many, any interleaving."""

import random
from dataclasses import dataclass, field

import pytest


@dataclass
class Tiles:
    """The list of ``kernel._locate``."""

    routed: list  # (expert, first, count) of every routed token tile
    shared: int
    up4: int
    down4: int
    up8: int
    down8: int
    parts: int = 1  # of an up tile's K

    @property
    def ups(self):
        return self.shared * self.up8 + len(self.routed) * self.up4

    @property
    def total(self):
        return self.ups * self.parts + self.shared * self.down8 + len(self.routed) * self.down4

    def part_of(self, ticket):
        """(number of a whole tile, part)"""
        if ticket < self.ups * self.parts:
            return divmod(ticket, self.parts)
        return ticket - self.ups * (self.parts - 1), 0

    def locate(self, ticket):
        """(is shared, is up, expert, block, counter) of a whole tile, as the device computes it."""
        a = self.shared * self.up8
        b = self.ups
        c = b + self.shared * self.down8
        up = ticket < b
        if ticket < a or b <= ticket < c:
            local = ticket if up else ticket - b
            return True, up, 0, local // self.shared, ("s", local % self.shared)
        local, size = (ticket - a, self.up4) if up else (ticket - c, self.down4)
        expert, first, count = self.routed[local // size]
        local -= first * size
        return False, up, expert, local // count, ("r", first + local % count)


def make(counts, shared, up4=2, down4=3, up8=1, down8=2, parts=1):
    routed = []
    for expert, n in enumerate(counts):
        routed += [(expert, len(routed), n)] * n
    routed = [(e, next(i for i, t in enumerate(routed) if t[0] == e), n) for e, _, n in routed]
    return Tiles(routed, shared, up4, down4, up8, down8, parts)


@dataclass
class Cta:
    """One CTA: takes a ticket, waits if it is a down tile or the last part of an up tile, finishes."""

    ticket: int = -1
    resident: bool = True
    taken: list = field(default_factory=list)


@pytest.mark.parametrize("parts", [1, 2, 8])
@pytest.mark.parametrize("ctas", [1, 2, 7, 132])
@pytest.mark.parametrize(("counts", "shared"), [((1, 0, 3), 2), ((0, 0), 1), ((5,), 0), ((0,), 0), ((1,) * 40, 3)])
def test_every_tile_runs_once_and_none_waits_for_ever(ctas, counts, shared, parts):
    tiles = make(counts, shared, parts=parts)
    rng = random.Random(0)
    ticket, done, finished = 0, {}, []
    workers = [Cta(resident=i < max(1, ctas // 2)) for i in range(ctas)]  # half of them are never scheduled
    idle = 0
    while len(finished) < tiles.total:
        worker = rng.choice([w for w in workers if w.resident])
        if worker.ticket < 0:
            if ticket >= tiles.total:
                idle += 1
                assert idle < 10**5
                continue
            worker.ticket, ticket = ticket, ticket + 1
        number, part = tiles.part_of(worker.ticket)
        is_shared, up, _expert, _block, counter = tiles.locate(number)
        last = part == parts - 1
        waits_for_parts = up and last and done.get(number, 0) < parts - 1
        if waits_for_parts or (not up and done.get(counter, 0) < (tiles.up8 if is_shared else tiles.up4)):
            idle += 1
            assert idle < 10**5, "every resident CTA waits"
            continue
        idle = 0
        if up:
            said = counter if last else number
            done[said] = done.get(said, 0) + 1
        finished.append(worker.ticket)
        worker.ticket = -1
    assert sorted(finished) == list(range(tiles.total))


@pytest.mark.parametrize(("counts", "shared"), [((1, 0, 3), 2), ((4, 4, 0, 1), 1), ((2,) * 9, 0)])
def test_list_covers_every_block_of_every_tile(counts, shared):
    tiles = make(counts, shared)
    seen = [tiles.locate(t) for t in range(tiles.total)]
    assert len(set(seen)) == tiles.total
    for is_shared, up, _expert, block, _counter in seen:
        assert 0 <= block < ((tiles.up8 if up else tiles.down8) if is_shared else (tiles.up4 if up else tiles.down4))
    for expert, first, count in tiles.routed:
        assert sum(s[2] == expert and not s[0] and s[1] for s in seen) == count * tiles.up4, (expert, first)
    # tiles that share weights follow each other, so that the second reads them from L2
    ups = [(s[2], s[3]) for s in seen if not s[0] and s[1]]
    assert len([i for i in range(1, len(ups)) if ups[i] != ups[i - 1]]) + 1 == len(set(ups)) if ups else True
