"""The GPU that work is for, where it is not the current one."""

from __future__ import annotations

import torch


def elsewhere(device: torch.device) -> bool:
    """Whether ``device`` is a GPU other than the current one, on whose stream Triton would start kernels."""
    return device.type == "cuda" and device.index is not None and device.index != torch.cuda.current_device()


def capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is being captured."""
    if device.type != "cuda":
        return False
    if elsewhere(device):
        with torch.cuda.device(device):
            return torch.cuda.is_current_stream_capturing()
    return torch.cuda.is_current_stream_capturing()
