"""What the device can do, measured in the same run: the two numbers that a floor is made of."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from foldmoe.bench.timing import median_seconds


@dataclass(frozen=True)
class Ceilings:
    """Measured rates.

    Args:
        read_bandwidth: bytes a second, reading alone.
        matmul: floating-point operations a second of one large product.
        matmul_dtype: in which numbers.
    """

    read_bandwidth: float
    matmul: float
    matmul_dtype: str

    def floor_seconds(self, nbytes: float, flops: float) -> float:
        """No kernel is faster than its bytes or its operations."""
        return max(nbytes / self.read_bandwidth, flops / self.matmul)

    def at_least(self, read_bandwidth: float, operations: float) -> Ceilings:
        """The same, but no lower than what an arm reached: the device can do that much."""
        reached = max(self.read_bandwidth, read_bandwidth), max(self.matmul, operations)
        return replace(self, read_bandwidth=reached[0], matmul=reached[1])


def measure(device: torch.device, *, fp8: bool) -> Ceilings:
    """Read bandwidth by a sum over memory far past every cache; operations by one large square product."""
    size = 2**31 if device.type == "cuda" else 2**28
    data = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=device)
    read = median_seconds(lambda: torch.amax(data), device)
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device).to(torch.bfloat16) for _ in range(2))
    if fp8 and device.type == "cuda":
        one = torch.ones((), device=device)
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()

        def product() -> object:
            return torch._scaled_mm(a8, b8, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

        return Ceilings(size / read, 2 * n**3 / median_seconds(product, device), "fp8")
    return Ceilings(size / read, 2 * n**3 / median_seconds(lambda: a @ b, device), "bf16")
