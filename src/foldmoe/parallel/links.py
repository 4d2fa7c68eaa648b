"""What joins the ranks, in bytes a second and direction, and where each figure comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foldmoe.planner.devices import Device


@dataclass(frozen=True)
class Link:
    """One rank's way out.

    Args:
        name: as given on the command line.
        bandwidth: bytes a second in one direction, for one GPU.
        source: whose figure it is.
        shared_memory: GPUs may write to each other's memory over it.
    """

    name: str
    bandwidth: float
    source: str
    shared_memory: bool = True


# Of B200 (2 x 900 GB/s) checked in glennklockwood.com/garden/processors, which quotes NVIDIA's architecture
# papers, in 2026; A100's (twelve links, 600 GB/s in all) on nvidia.com/data-center/nvlink.
_NVLINK = {
    "sm_80": (300e9, "A100 datasheet: 600 GB/s over both directions"),
    "sm_90": (382e9, "measured: plain copies both ways between two H200s; 450 in the datasheet"),
    "sm_100": (900e9, "B200 datasheet: 1.8 TB/s over both directions"),
}
_INFINIBAND = {"ib400": (50e9, "400 Gb/s, one adapter a GPU, nothing taken off for headers")}


def find_link(name: str, device: Device) -> Link:
    """ "nvlink" (of the device's generation), "ib400", or a number of GB/s a direction.

    Raises:
        ValueError: an unknown name, or NVLink for a device whose generation is not known here.
    """
    if name in _INFINIBAND:
        return Link(name, *_INFINIBAND[name], shared_memory=False)
    if name == "nvlink":
        if device.arch not in _NVLINK:
            raise ValueError(f"no NVLink figure for {device.name}; state the link as a number of GB/s a direction")
        return Link(name, *_NVLINK[device.arch])
    try:
        bandwidth = float(name) * 1e9
    except ValueError:
        bandwidth = 0.0
    if not 0 < bandwidth < float("inf"):
        raise ValueError(f"unknown link {name!r}; expected nvlink, {', '.join(_INFINIBAND)} or GB/s a direction")
    return Link(f"{name} GB/s", bandwidth, "as stated")
