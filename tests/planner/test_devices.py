"""Devices by name, by torch device, and the one that is here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from foldmoe.planner.devices import KNOWN, Device, resolve, torch_device


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


@pytest.mark.parametrize("name", ["mps", "xpu", "meta"])
def test_a_torch_device_that_no_layer_runs_on_is_no_device_to_plan_for(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"no layer of ours runs on {name}, found device '{name}'; expected one of cpu"
    ):
        resolve(name)
    with pytest.raises(ValueError, match=rf"device '{name}': layers run on 'cpu' or 'cuda' .* alone. Here: cpu"):
        torch_device(name)


def test_a_gpu_that_is_not_here_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA H200", 9, 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert torch_device(None) == torch.device("cuda")
    assert torch_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match=r"device 'cuda:2' is not here. Here: cpu, cuda:0, cuda:1"):
        torch_device("cuda:2")

    def refuse(device: torch.device) -> None:
        raise AssertionError("Invalid device id")

    monkeypatch.setattr(torch.cuda, "get_device_properties", refuse)
    with pytest.raises(ValueError, match=r"no device 'cuda:2' here: cpu, cuda:0, cuda:1"):
        resolve("cuda:2")


def test_devices_to_run_on_are_torch_devices_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert torch_device(None) == torch_device("cpu") == torch_device(torch.device("cpu")) == torch.device("cpu")
    for name, said in (
        (
            "h200",
            r"device 'h200' is a name to plan for; 'foldmoe plan --device h200' plans for it without it. Here: cpu",
        ),
        ("MI300X", r"'foldmoe plan --device mi300x'"),
        ("foo", r"device 'foo' is unknown to torch. Here: cpu"),
        ("", r"device '' is unknown to torch"),
        ("cuda", r"device 'cuda' is not here. Here: cpu"),
    ):
        with pytest.raises(ValueError, match=said):
            torch_device(name)
