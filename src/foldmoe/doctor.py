"""What this machine can run, and why not more."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata, util

import torch

import foldmoe.backends  # noqa: F401  registers the backends that are asked
from foldmoe import settings
from foldmoe.integrations.vllm import advice
from foldmoe.planner import FusionPolicy, capability, devices
from foldmoe.runtime import kernel_cache

EXTRAS = {
    "triton": "gpu",
    "huggingface_hub": "hub",
    "transformers": "transformers",
    "accelerate": "transformers",
    "vllm": "vllm",
    "lm_eval": "eval",
    "jinja2": "report",
}
"""Optional packages and the extra that brings each."""


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do where something is missing.

    Args:
        broken: what is installed here does not work; a package or a GPU that is merely not there is none of this.
    """

    subject: str
    found: str
    ok: bool
    advice: str = ""
    broken: bool = False


def examine() -> list[Finding]:
    """Look at the device, every backend, optional packages and the environment.

    Raises:
        ValueError: an environment variable of ours that is misspelt or has an unknown value.
    """
    device = devices.resolve(None)
    chosen = settings.read().policy
    if chosen.backend != "auto":
        capability.find(chosen.backend)  # refuses an unknown name
    findings = [
        Finding("torch", torch.__version__, True),
        Finding("device", f"{device.name} ({device.arch or device.kind})", True, _device_advice(device)),
        *(_backend(backend, device) for backend in capability.registered()),
        *(_package(name, extra) for name, extra in EXTRAS.items()),
        Finding("policy", _policy(chosen), True, "from FOLDMOE_ variables"),
        _kernel_cache(),
        _advised(advice.plugin_state()),
    ]
    return findings


def examine_command(words: list[str]) -> list[Finding]:
    """What stands against folding in a ``vllm serve`` command, flag by flag, and what to change.

    Raises:
        ValueError: another command.
    """
    return [_advised(line) for line in advice.command(words, settings.read().policy)]


def _advised(line: advice.Advice) -> Finding:
    return Finding(line.subject, line.found, line.ok, line.what_to_do, line.broken)


def _kernel_cache() -> Finding:
    folder, problem = kernel_cache.directory(), kernel_cache.problem()
    if folder is None:
        return Finding("kernel cache", "Triton's own", True, "FOLDMOE_CACHE_DIR names another")
    return Finding("kernel cache", str(folder), problem is None, problem or "from FOLDMOE_CACHE_DIR")


def _policy(policy: FusionPolicy) -> str:
    requantize = "requantising allowed" if policy.allow_requantize else "as stored"
    return f"fold {policy.fold}, {requantize}, activations {policy.activations}, backend {policy.backend}"


def _device_advice(device: devices.Device) -> str:
    return "no GPU is visible to torch: layers run on the CPU" if device.kind == "cpu" else ""


def _backend(backend: capability.Capability, device: devices.Device) -> Finding:
    missing = backend.unavailable(device)
    bits = "deterministic" if backend.deterministic else "not batch-invariant"
    return Finding(f"backend {backend.name}", bits if missing is None else "not here", missing is None, missing or "")


def _package(name: str, extra: str) -> Finding:
    if util.find_spec(name) is None:
        return Finding(name, "not installed", False, f"pip install 'foldmoe[{extra}]'")
    try:
        return Finding(name, metadata.version(name), True)
    except metadata.PackageNotFoundError:
        return Finding(name, "installed", True)
