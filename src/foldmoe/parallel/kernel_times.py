"""How long the local layer takes: from a table that was measured, or from what the device can do at best.

The floor of a layer is the longer of its bytes at the device's read bandwidth and its operations at the device's rate
for large products. Kernels do not reach it: a stated efficiency divides it. For the Hopper backend both parts and a
fixed time are added instead, with factors fitted to measured layers.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foldmoe.moe.spec import in_words
from foldmoe.planner.devices import KNOWN

if TYPE_CHECKING:
    from foldmoe.moe.spec import LayerSpec
    from foldmoe.planner.devices import Device

EFFICIENCY = 0.62
"""Floor divided by time: the median of the best kernels measured on an H200 for one EP rank of V4-Flash, V4.1 and
V4-Pro at 1 to 8192 tokens (it ranges from 0.36 to 0.84)."""

HOPPER_FIXED, HOPPER_BYTES, HOPPER_OPERATIONS = 15e-6, 1.0, 1.75
"""Seconds of a folded Hopper layer: fixed, and times its bytes' and its operations' floors. Fitted by eye to README's
table of shape A (1 to 8192 tokens, 37 to 4933 us), which it meets within 13 %, and to the local launches of
docs/parallel.md (A and D over two H200s, 1 to 2048 tokens), which it meets within 15 %."""

# Dense rates, without the sparsity that data sheets multiply by two; checked in 2026.
# A100 (311.9 TFLOP/s): hmc-tech.com's table of the A100 SXM. H100 SXM (989.4 and 1,978.9) and HGX B200 at 1,000 W
# (2,250 and 4,500): glennklockwood.com/garden/processors, which quotes NVIDIA's architecture papers.
# AMD: compute units x operations a clock x peak clock, MI300X 304 x 4,096 x 2.1 GHz and MI355X 256 x 8,192 x 2.4 GHz in
# FP8 (operations a clock as AMD showed them at ISSCC 2026; clocks that give the published 2,615 and 5,000 TFLOP/s),
# half of that in bf16.
_RATES = {
    "a100": (312e12, 312e12, "A100 datasheet, dense bf16; it has no FP8"),
    "h100": (989e12, 1979e12, "H100 SXM datasheet, dense"),
    "h200": (776e12, 1427e12, "measured, 8192^3"),
    "b200": (2250e12, 4500e12, "B200 datasheet, dense"),
    "mi300x": (1307e12, 2615e12, "MI300X, compute units x clock, dense"),
    "mi355x": (2517e12, 5033e12, "MI355X, compute units x clock, dense"),
}
"""Operations a second in bf16 and in FP8, and whose figures they are."""


@dataclass(frozen=True)
class Floor:
    """What a device can do at best.

    Args:
        read_bandwidth: bytes a second.
        operations: a second, in the layer's precision.
        source: whose figures these are.
    """

    read_bandwidth: float
    operations: float
    source: str

    @classmethod
    def of(cls, device: Device, *, fp8: bool) -> Floor:
        """The floor of a known device.

        Raises:
            ValueError: a CPU, or a device without figures.
        """
        key = next((key for key in _RATES if key.upper() in device.name.upper()), None)
        if key is None:
            raise ValueError(
                f"no figures for {device.name}: an estimate needs a device that is known ({', '.join(_RATES)})"
            )
        bf16, narrow, source = _RATES[key]
        return cls(KNOWN[key].memory_bandwidth, narrow if fp8 else bf16, source)

    def seconds(self, nbytes: float, operations: float) -> float:
        return max(nbytes / self.read_bandwidth, operations / self.operations)

    def hopper_seconds(self, nbytes: float, operations: float) -> float:
        """What the Hopper backend's folded launch, its prologue and its combine take."""
        moving, computing = nbytes / self.read_bandwidth, operations / self.operations
        return HOPPER_FIXED + HOPPER_BYTES * moving + HOPPER_OPERATIONS * computing


@dataclass(frozen=True)
class Measured:
    """Times of one rank's folded layer, as ``foldmoe bench layer --out`` writes them.

    Args:
        spec: the layer that was timed, in the benchmark's words.
        tokens, seconds: in rising order of tokens.
    """

    spec: str
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    @classmethod
    def read(cls, path: Path | str) -> Measured:
        """The folded arm of a benchmark's result.

        Raises:
            ValueError: a file that is none, or holds no folded arm.
        """
        try:
            found: dict[str, Any] = json.loads(Path(path).read_text())
            rows = {int(r["tokens"]): float(r["seconds"]) for r in found["rows"] if r["arm"].split()[-1] == "folded"}
            spec = str(found["spec"])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"{path} is no result of 'foldmoe bench layer --out': {error}") from error
        if not rows:
            raise ValueError(f"{path} holds no folded arm; measure with --arms folded")
        tokens = tuple(sorted(rows))
        return cls(spec, tokens, tuple(rows[count] for count in tokens))

    def check(self, local: LayerSpec) -> None:
        """The table is of this layer, one rank's part.

        Raises:
            ValueError: naming both.
        """
        wanted = in_words(local)
        if wanted != self.spec:
            raise ValueError(f"measured: {self.spec}; one rank of {local.name} is: {wanted}; measure that layer")

    def at(self, tokens: int) -> float | None:
        """Seconds, interpolated on logarithms; None outside the table: nothing is extrapolated."""
        if not self.tokens[0] <= tokens <= self.tokens[-1]:
            return None
        right = bisect_left(self.tokens, tokens)
        if self.tokens[right] == tokens:
            return self.seconds[right]
        a, b = self.tokens[right - 1 : right + 1]
        share = log(tokens / a) / log(b / a)
        low, high = (log(value) for value in self.seconds[right - 1 : right + 1])
        return exp(low + share * (high - low))
