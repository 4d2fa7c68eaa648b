"""What a measurement says it was made on."""

import re
import subprocess

import pytest
import torch

from foldmoe.bench import versions


def test_a_cpu_has_no_driver_and_no_assembler():
    found = versions.collect(torch.device("cpu"))
    assert found["torch"] == torch.__version__.partition("+")[0] or found["torch"] == torch.__version__
    assert "threads" in found["device"]
    assert not {"driver", "cuda", "ptxas"} & set(found)


@pytest.mark.parametrize("arch", [90, 100])
def test_the_assembler_is_the_one_that_compiles(arch: int):
    compiler = pytest.importorskip("triton.backends.nvidia.compiler", reason="triton is not installed")
    said = subprocess.run([compiler.get_ptxas(arch).path, "--version"], capture_output=True, text=True, check=True)
    version = versions._ptxas(arch)
    assert version is not None
    assert re.search(rf"V{re.escape(version)}\b", said.stdout)


def test_no_assembler_is_no_version(monkeypatch: pytest.MonkeyPatch):
    compiler = pytest.importorskip("triton.backends.nvidia.compiler", reason="triton is not installed")

    def missing(_arch: int) -> str:
        raise RuntimeError("Cannot find ptxas")

    monkeypatch.setattr(compiler, "get_ptxas_version", missing)
    assert versions._ptxas(90) is None
