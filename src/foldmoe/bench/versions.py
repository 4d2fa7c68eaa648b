"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path

import torch

_PACKAGES = ("torch", "triton", "transformers", "vllm", "humming-kernels")


def collect(device: torch.device, *more: str) -> dict[str, str]:
    """Processor or card, driver, toolkit and packages (and ``more``), by name; what is not there is left out."""
    found = {"foldmoe": metadata.version("foldmoe") if _installed("foldmoe") else "source"}
    found |= {name: metadata.version(name) for name in (*_PACKAGES, *more) if _installed(name)}
    found["python"] = platform.python_version()
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        found["device"] = facts.name
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
        if driver := _driver():
            found["driver"] = driver
        if not torch.version.hip and (ptxas := _ptxas(10 * facts.major + facts.minor)):
            found["ptxas"] = ptxas
    else:
        found["device"] = f"{_cpu_name()}, {torch.get_num_threads()} threads of {os.cpu_count()}"
    return found


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    match = re.search(r"\d+\.\d+\.\d+", path.read_text()) if path.exists() else None
    return match[0] if match else None


def _ptxas(arch: int) -> str | None:
    """The assembler by which Triton compiles for an architecture (90 for sm_90): it carries two, and takes others."""
    try:
        from triton.backends.nvidia.compiler import get_ptxas_version

        text = get_ptxas_version(arch)
    except (ImportError, OSError, RuntimeError, subprocess.CalledProcessError):
        return None
    match = re.search(r"V(\d+\.\d+\.\d+)", text)
    return match[1] if match else None


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    match = re.search(r"model name\s*:\s*(.+)", path.read_text()) if path.exists() else None
    return match[1] if match else platform.machine()
