"""Devices by name, by torch device, and the one that is here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from foldmoe.planner.devices import KNOWN, Device, resolve


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, major: int, minor: int, hip: str | None = None) -> None:
    facts = SimpleNamespace(name=name, major=major, minor=minor, gcnArchName="gfx942:sramecc+")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(torch.version, "hip", hip)


def test_names_objects_and_torch_devices() -> None:
    assert resolve("h200") is KNOWN["h200"]
    assert resolve(KNOWN["mi355x"]) is KNOWN["mi355x"]
    assert resolve(torch.device("cpu")) is KNOWN["cpu"]
    assert KNOWN["h100"].is_hopper
    assert KNOWN["h200"].is_hopper
    assert not KNOWN["b200"].is_hopper
    assert not KNOWN["mi300x"].is_hopper
    with pytest.raises(ValueError, match=r"unknown device 'abacus'; expected one of cpu, a100"):
        resolve("abacus")


def test_without_a_gpu_the_cpu_is_the_best_present(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve(None) is KNOWN["cpu"]
    assert resolve("cuda:1") == Device("cuda:1", "cuda")


def test_a_gpu_that_is_here_is_described_by_its_own_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H200", 9, 0)
    found = resolve(None)
    assert (found.kind, found.arch) == ("cuda", "sm_90")
    assert found.memory_bandwidth == KNOWN["h200"].memory_bandwidth
    assert found.is_hopper
    pretend(monkeypatch, "NVIDIA Something New", 12, 0)
    assert (resolve("cuda").arch, resolve("cuda").memory_bandwidth) == ("sm_120", 0.0)
    pretend(monkeypatch, "AMD Instinct MI300X", 9, 4, hip="7.0")
    assert (resolve("cuda").kind, resolve("cuda").arch) == ("rocm", "gfx942")
