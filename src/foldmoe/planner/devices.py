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


_RUN_ON = ("cpu", "cuda")
_IN_WORDS = "'cpu' or 'cuda' (torch's name for ROCm too)"


def resolve(device: Device | torch.device | str | None) -> Device:
    """A device by name ("h200"), by torch device ("cuda:0"), or the best one present (None).

    Raises:
        ValueError: for a name that is neither, and for a torch device that nothing here runs on, such as "mps".
    """
    if isinstance(device, Device):
        return device
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, str) and device in KNOWN:
        return KNOWN[device]
    wanted = f"expected one of {', '.join(KNOWN)} or a torch device"
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"unknown device {device!r}; {wanted}") from error
    if found.type not in _RUN_ON:
        raise ValueError(f"no layer of ours runs on {found.type}, found device {str(device)!r}; {wanted}: {_IN_WORDS}")
    if found.type == "cpu" or not torch.cuda.is_available():
        return KNOWN["cpu"] if found.type == "cpu" else Device(str(found), "cuda")
    try:
        facts = torch.cuda.get_device_properties(found)
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"no device {str(device)!r} here: {', '.join(_here())}") from error
    if torch.version.hip is not None:
        return Device(facts.name, "rocm", facts.gcnArchName.split(":")[0])
    known = next((d for key, d in KNOWN.items() if key.upper() in facts.name.upper()), None)
    bandwidth = known.memory_bandwidth if known else 0.0
    return Device(facts.name, "cuda", f"sm_{facts.major}{facts.minor}", bandwidth)


def torch_device(name: str | torch.device | None) -> torch.device:
    """The device of this machine to run on.

    Args:
        name: as torch calls it ("cpu", "cuda:1"); None: the GPU if there is one, else the CPU.

    Raises:
        ValueError: a name that torch does not know, one that only plans are made for ("h200"), or a device that is
            not here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    here = _here()
    try:
        found = torch.device(name)
    except RuntimeError as error:
        why = "is unknown to torch"
        if (planned := str(name).lower()) in KNOWN:
            why = f"is a name to plan for; 'foldmoe plan --device {planned}' plans for it without it"
        raise ValueError(f"device {name!r} {why}. Here: {', '.join(here)}") from error
    if found.type not in _RUN_ON:
        raise ValueError(f"device {str(name)!r}: layers run on {_IN_WORDS} alone. Here: {', '.join(here)}")
    if found.type == "cuda" and f"cuda:{found.index or 0}" not in here:
        raise ValueError(f"device {str(name)!r} is not here. Here: {', '.join(here)}")
    return found


def _here() -> list[str]:
    """Devices of this machine that layers run on, as torch calls them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(f"cuda:{index}" for index in range(gpus))]
