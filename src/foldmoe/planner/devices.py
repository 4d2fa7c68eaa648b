"""The devices that plans are made for: facts that decide, not a list of blessed models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Args:
        name: as given on the command line.
        kind: "cpu", "cuda" or "rocm".
        arch: compute capability times ten (90 for Hopper), or the gfx number for AMD; None for a CPU.
        memory_bandwidth: bytes a second; measured where a measurement exists, else the vendor's figure.
    """

    name: str
    kind: Literal["cpu", "cuda", "rocm"]
    arch: str | None = None
    memory_bandwidth: float = 0.0

    @property
    def is_hopper(self) -> bool:
        return self.kind == "cuda" and self.arch == "sm_90"


KNOWN = {
    device.name: device
    for device in (
        Device("cpu", "cpu"),
        Device("a100", "cuda", "sm_80", 2.0e12),
        Device("h100", "cuda", "sm_90", 3.35e12),
        Device("h200", "cuda", "sm_90", 4.62e12),
        Device("b200", "cuda", "sm_100", 8.0e12),
        Device("mi300x", "rocm", "gfx942", 5.3e12),
        Device("mi355x", "rocm", "gfx950", 8.0e12),
    )
}


def resolve(device: Device | torch.device | str | None) -> Device:
    """A device by name ("h200"), by torch device ("cuda:0"), or the best one present (None).

    Raises:
        ValueError: for a name that is neither.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, str) and device in KNOWN:
        return KNOWN[device]
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; expected one of {', '.join(KNOWN)} or a torch device") from error
    if found.type == "cpu" or not torch.cuda.is_available():
        return KNOWN["cpu"] if found.type == "cpu" else Device(str(found), "cuda")
    facts = torch.cuda.get_device_properties(found)
    if torch.version.hip is not None:
        return Device(facts.name, "rocm", facts.gcnArchName.split(":")[0])
    known = next((d for key, d in KNOWN.items() if key.upper() in facts.name.upper()), None)
    bandwidth = known.memory_bandwidth if known else 0.0
    return Device(facts.name, "cuda", f"sm_{facts.major}{facts.minor}", bandwidth)
