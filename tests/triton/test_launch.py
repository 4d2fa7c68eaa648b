"""Compiles that would fall into a graph capture are refused; configs and scratch memory are what they say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from foldmoe.backends import Call
from foldmoe.backends.triton import launch as launching
from foldmoe.backends.triton.config import Machine, choose
from foldmoe.backends.triton.rank_routes import rank_routes
from foldmoe.runtime import kernels
from foldmoe.runtime.kernels import Compiler, compiling
from foldmoe.runtime.workspace import ALIGNMENT, Carve
from tests.runtime.support import Current
from tests.triton.support import pack, weights


class Recorder:
    """Stands in for a kernel."""

    params = ()
    __name__ = "up"

    def __init__(self) -> None:
        self.runs = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self

    def __call__(self, **arguments: Any) -> None:
        self.runs += 1


def test_a_compile_during_capture_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Recorder(), {"x": torch.zeros(16)}
    launching.launch(kernel, (1,), x, {"tokens": 4}, BM=16)
    monkeypatch.setattr(kernels, "capturing", lambda device: True)
    launching.launch(kernel, (1,), x, {"tokens": 4}, BM=16)
    with pytest.raises(RuntimeError, match="'up' would be compiled during a CUDA graph capture; warm up first"):
        launching.launch(kernel, (1,), x, {"tokens": 4}, BM=32)
    with pytest.raises(RuntimeError, match="warm up first"):
        launching.launch(kernel, (1,), {"x": torch.zeros(16, dtype=torch.int32)}, {"tokens": 4}, BM=16)
    assert kernel.runs == 2


class Parameter:
    """One of a kernel's."""

    def __init__(self, name: str, plain: bool) -> None:
        self.name, self.do_not_specialize, self.do_not_specialize_on_alignment = name, plain, False


@pytest.mark.parametrize("plain", [False, True])
def test_numbers_that_triton_tells_apart_have_keys_of_their_own(plain: bool) -> None:
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    kernel = Recorder()
    found: dict[object, set[object]] = {}
    kernel.params = (Parameter("n", plain),)  # type: ignore[assignment]
    for n in (1, 2, 16, 2**31, 2**31 - 1, 1.0, 2.0, 2.5, 16.0, True, False):
        key = tuple(launching._facts({}, {"n": n}, kernel))
        found.setdefault(key, set()).add(native_specialize_impl(BaseBackend, n, False, not plain, True))
    assert all(len(forms) == 1 for forms in found.values()), found
    launching._plain_names.clear()  # by id: this stand-in's may be another's later


def test_a_routed_scale_is_one_kind_of_number() -> None:
    found = Compiler(lambda name: False, lambda kernel: None)
    with compiling(found):
        for scale in (1, 2, 2.5):
            ids = torch.zeros(2, 2, dtype=torch.int32, device="meta")
            x, weights = torch.empty(2, 8, device="meta"), torch.ones(2, 2, device="meta")
            strays = torch.zeros(1, dtype=torch.int64, device="meta")
            rank_routes(Call(x, ids, weights, routed_scale=scale), range(2), 4, True, strays)
    assert len(found._met) == 1


@pytest.mark.parametrize("how", ["here", "ahead"])
def test_on_rocm_a_long_storage_has_a_key_of_its_own(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    amd = pytest.importorskip("triton.backends.amd.compiler").HIPBackend
    sizes = (16, 2**29 - 1, 2**29, 2**30)  # float32: two of them up to 2 GB
    tensors = [torch.empty(size, device="meta") for size in sizes]
    assert len({tuple(launching._facts({"x": t}, {}, Recorder())) for t in tensors}) == 1
    if how == "here":
        monkeypatch.setattr(torch.version, "hip", "7.0")
    else:
        monkeypatch.setattr(launching.offline, "kind", "rocm")
    found: dict[object, set[str]] = {}
    for t in tensors:
        forms = found.setdefault(tuple(launching._facts({"x": t}, {}, Recorder())), set())
        forms.add(amd.get_tensor_specialization(t, align=True))
    assert len(found) == 2
    assert all(len(forms) == 1 for forms in found.values()), found


class On:
    """A tensor as launches see it, on a GPU."""

    dtype = torch.float32

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def data_ptr(self) -> int:
        return 0


def test_a_kernel_starts_on_its_tensors_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    current = Current(monkeypatch)
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(asked.append(current.index)))
    kernel = Recorder()
    ran: list[int] = []
    monkeypatch.setattr(Recorder, "__call__", lambda self, **arguments: ran.append(current.index))
    for index in (0, 1, 1, 0):
        launching.launch(kernel, (1,), {"x": On(index)}, {}, BM=16)  # type: ignore[dict-item]
        assert current.index == 0
    assert ran == [0, 1, 1, 0]
    assert asked == [0, 1]  # once a first start, of the right GPU


@pytest.mark.parametrize("machine", [Machine(232448), Machine(65536, most_stages=2), Machine(101376)])
@pytest.mark.parametrize("tokens", [1, 16, 128, 512, 2048, 8192])
@pytest.mark.parametrize("together", [False, True])
def test_config(tokens: int, together: bool, machine: Machine) -> None:
    layer = pack(*weights("mxfp4-fp8", 8, 64, 64, 64), "fp8")
    config = choose(layer.routed, layer.shared, tokens, 2, machine, together=together)
    assert config == choose(layer.routed, layer.shared, tokens, 2, machine, together=together)
    assert (config.up.shared_tokens > config.up.routed_tokens) == (not together and 16 < tokens < 256)
    assert config.up.rows == 128
    assert config.up.routed_tokens == config.down.routed_tokens
    assert config.up.routed_tokens >= min(16, tokens // 4)
    assert "routed_tokens=" in str(config)


def test_buffers_are_disjoint_and_aligned() -> None:
    carve = Carve()
    carve.add("a", (3,), torch.int32)
    carve.add("none", (0, 4), torch.float32)
    carve.add("b", (2, 5), torch.bfloat16)
    found = carve.take(torch.device("cpu"))
    assert found["a"].shape == (3,)
    assert found["b"].shape == (2, 5)
    assert carve.nbytes == 3 * ALIGNMENT
    addresses = [t.data_ptr() for t in found.values()]
    assert [address - addresses[0] for address in addresses] == [0, ALIGNMENT, 2 * ALIGNMENT]
