"""What dispatch and combine take beside their bytes on the link: launches, flags, quantising, unpacking, sums.

A phase takes ``fixed + bytes * (per_byte + 1 / link)``, and the whole layer a little more than its phases one by one.
All constants are least squares of the relative error over the folded native rows of ``foldmoe bench parallel`` on two
H200s, shapes A and D, which docs/parallel.md shows. To fit them to another run::

    foldmoe bench parallel --shape A --tokens 1,8,32,128,512,2048 --out A.json    # and D
    python -m foldmoe.bench.parallel.fit A.json D.json

prints :data:`MEASURED` and the documentation's tables. More ranks were never measured; neither was another link.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foldmoe.parallel.scheme import Dispatch


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
    """

    dispatch: Cost
    combine: Cost
    together: float


MEASURED: dict[Dispatch, Exchange] = {
    "all_gather": Exchange(Cost(116.9e-6, 75.5e-12), Cost(16.1e-6, 5.5e-12), 28.4e-6),
    "all_to_all": Exchange(Cost(2019.9e-6, 499.3e-12), Cost(157.1e-6, 45.6e-12), 660.4e-6),
    "symmetric": Exchange(Cost(10.1e-6, 2.3e-12), Cost(8.4e-6, 0.6e-12), 2.8e-6),
}
"""By strategy. The two collectives' are of a run when torch expressions packed and summed, not yet kernels."""
