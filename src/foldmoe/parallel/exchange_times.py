"""What dispatch and combine take beside their bytes on the link: launches, flags, quantising, unpacking, sums.

A phase takes ``fixed + bytes * (per_byte + 1 / link)``, and the whole layer a little more than its phases one by one.
Constants are least squares of the relative error over the folded native rows of ``foldmoe bench parallel`` on two
H200s, shapes A and D, which docs/parallel.md shows; an all-to-all's last four those of the smallest largest error, the
last two over its rows of the other folds. To fit them to another run::

    foldmoe bench parallel --shape A --tokens 128,1,8,32,512,2048 --out A.json    # and D
    python -m foldmoe.bench.parallel.fit A.json D.json

prints :data:`MEASURED` and the documentation's tables. More ranks were never measured; neither was another link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foldmoe.parallel.scheme import Dispatch
    from foldmoe.planner.plan import Strategy


@dataclass(frozen=True)
class Cost:
    """One phase.

    Args:
        fixed: seconds, however few the bytes.
        per_byte: seconds that the GPU spends on a byte beside moving it.
    """

    fixed: float
    per_byte: float

    def seconds(self, nbytes: float, bandwidth: float) -> float:
        """Of a phase that moves ``nbytes`` over a link of ``bandwidth`` bytes a second."""
        return self.fixed + nbytes * (self.per_byte + 1 / bandwidth)


@dataclass(frozen=True)
class Exchange:
    """One strategy.

    Args:
        dispatch, combine: its phases.
        together: seconds of the whole layer beyond its phases: ranks that wait for one another between them, and where
            the host takes part, what it takes to start the local launch.
        busy: seconds that the host needs for what follows once it has started the local launch, which runs meanwhile.
        apart, slot: seconds that the host takes beyond that for a shared expert with a launch of its own (measured on
            a second stream), and for one in a slot.
    """

    dispatch: Cost
    combine: Cost
    together: float
    busy: float = 0.0
    apart: float = 0.0
    slot: float = 0.0

    def beyond(self, local: float, strategy: Strategy) -> float:
        """Seconds that the whole layer takes beyond its phases, less what they overlap.

        Args:
            local: seconds of the local launch.
            strategy: what the plan says of the shared expert.
        """
        more = {"native": 0.0, "slot": self.slot, "serial": self.apart}[strategy]
        return self.together + more - min(local, self.busy)


MEASURED: dict[Dispatch, Exchange] = {
    "all_gather": Exchange(Cost(12.9e-6, 7.0e-12), Cost(11.3e-6, 2.7e-12), 6.9e-6),
    "all_to_all": Exchange(Cost(768.1e-6, 0.0e-12), Cost(237.0e-6, 0.0e-12), 870.0e-6, 320.0e-6, 475.0e-6, 160.0e-6),
    "symmetric": Exchange(Cost(9.8e-6, 3.2e-12), Cost(8.1e-6, 1.0e-12), 2.1e-6),
}
"""By strategy. An all-to-all is paced by the host, whose times scatter: no time a byte shows through at 1 to 2048
tokens, and a local launch of up to 0.32 ms costs no time of its own. On another host A took 11 to 37 % less."""
