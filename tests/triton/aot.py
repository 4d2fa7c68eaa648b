"""Compile what a layer would launch, for any GPU, on a machine without one.

    for found in record(layer, call):
        kernel = compile_for(found, "sm_90")

The launches are those of the real host code: it runs on CPU tensors with the launcher replaced by a recorder.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from foldmoe.backends.triton import steps
from foldmoe.backends.triton.config import MACHINES, Machine, choose

if TYPE_CHECKING:
    from pathlib import Path

    from foldmoe.backends.base import Call
    from foldmoe.backends.triton.layer import TritonLayer

TARGETS = {
    name: (GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[3:]), 32), machine)
    for name, machine in MACHINES.items()
}

_TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int16: "*i16", torch.int32: "*i32",
    torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Launch:
    """One recorded launch: the kernel, a Triton signature and its compile-time values."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    divisible: tuple[str, ...]
    options: dict[str, int]

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def key(self) -> tuple[Any, ...]:
        return (
            self.name,
            *self.signature.items(),
            *sorted(self.constants.items()),
            self.divisible,
            *self.options.items(),
        )


def record(layer: TritonLayer, call: Call, machine: Machine, *, folded: bool = True) -> list[Launch]:
    """The launches of one forward call on ``machine``; nothing runs."""
    found: list[Launch] = []

    def recorder(kernel: Any, grid: Any, tensors: dict[str, Any], numbers: dict[str, Any], **constants: Any) -> None:
        found.append(launch_of(kernel, tensors, numbers, constants))

    launch, config = steps.launch, layer.config
    steps.launch = recorder
    layer.config = config or choose(layer.routed, layer.shared, *call.topk_ids.shape, machine, together=folded)
    try:
        layer.forward(call, folded=folded)
    finally:
        steps.launch, layer.config = launch, config
    return found


def launch_of(kernel: Any, tensors: dict[str, Any], numbers: dict[str, Any], constants: dict[str, Any]) -> Launch:
    """What ``launch`` was called with."""
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    signature: dict[str, str] = {}
    divisible: list[str] = []
    fixed = dict(constants)
    for parameter in kernel.params:
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name in tensors:
            signature[name] = _TYPES[tensors[name].dtype]
            if not parameter.do_not_specialize_on_alignment:
                divisible.append(name)
        elif numbers[name] == 1 and not parameter.do_not_specialize and isinstance(numbers[name], int):
            signature[name], fixed[name] = "constexpr", 1
        else:
            value = numbers[name]
            signature[name] = "fp32" if isinstance(value, float) else "i32" if abs(value) < 2**31 else "i64"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                divisible.append(name)
    return Launch(kernel, signature, fixed, tuple(divisible), options)


def compile_for(found: Launch, target: str) -> Any:
    """A compiled kernel with its intermediate forms in ``.asm``."""
    names = list(found.signature)
    source = ASTSource(
        fn=found.kernel,
        signature=found.signature,
        constexprs={(names.index(name),): value for name, value in found.constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in found.divisible},
    )
    return triton.compile(source, target=TARGETS[target][0], options=found.options)


def spills(kernel: Any, folder: Path) -> dict[str, int]:
    """Registers, stack and shared bytes, and local-memory instructions (in all, inside loops) of an NVIDIA kernel."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    usage, sass = (_cuobjdump(flag, cubin) for flag in ("-res-usage", "-sass"))
    registers, stack = (int(re.findall(rf"{name}:(\d+)", usage)[-1]) for name in ("REG", "STACK"))
    code = [(int(at, 16), text) for at, text in re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass)]
    local = [at for at, text in code if re.search(r"\b(?:LDL|STL)\b", text)]
    jumps = [(int(to, 16), at) for at, text in code for to in re.findall(r"\bBRA (?:\S+, )?0x([0-9a-f]+)", text)]
    looped = sum(any(start <= at <= end for start, end in jumps if start < end) for at in local)
    return {
        "registers": registers, "stack": stack, "local": len(local), "local_in_loops": looped,
        "shared": kernel.metadata.shared,
    }  # fmt: skip


def performance_warnings(kernel: Any, folder: Path) -> list[str]:
    """What ptxas for sm_90 says of wgmma: C7510 and its kin."""
    ptx = folder / "kernel.ptx"
    ptx.write_text(kernel.asm["ptx"])
    command = [get_ptxas(90).path, "-v", "-arch=sm_90a", str(ptx), "-o", os.devnull]
    return re.findall(r"C75\d\d[^\n]*", subprocess.run(command, capture_output=True, text=True, check=True).stderr)


def _cuobjdump(flag: str, cubin: Path) -> str:
    tool = os.path.join(os.path.dirname(triton.__file__), "backends", "nvidia", "bin", "cuobjdump")
    return subprocess.run([tool, flag, str(cubin)], capture_output=True, text=True, check=True).stdout
