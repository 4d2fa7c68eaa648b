"""Compiles the launch for sm_90 with no GPU, and reads what matters from the machine code."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass

import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from foldmoe.runtime.offline import standing_in


@dataclass(frozen=True)
class Report:
    """Of one compiled kernel: shared memory, spilled bytes, local accesses inside K loops, ptxas warnings, products; K
    loops that wait for their reads of shared memory before they give a slot back; loads and stores where an mbarrier
    is."""

    shared: int
    spilled: int
    loop_spills: int
    loops: int
    fenced: int
    warnings: tuple[str, ...]
    products: int
    waits: int
    at_barriers: tuple[str, ...]


def compile_config(config):
    """The folded launch for ``config`` on sm_90."""
    from foldmoe.backends.hopper.kernels.folded import folded_moe

    nt, nts, wgs, step = config.tokens, config.shared_tokens, config.warpgroups, config.geometry.step
    byte = torch.zeros(4096, 256, dtype=torch.uint8)
    rows = torch.zeros(4096, 256).to(config.geometry.dtype)
    bits = 8 * rows.element_size()
    wide, word = torch.zeros(64, 1024), torch.zeros(16, dtype=torch.int32)

    def describe(t, box, swizzle, bits):
        return TensorDescriptor(t, list(t.shape), list(t.stride()), box, gl.NVMMASharedLayout(swizzle, bits, 2))

    offsets = describe(byte, [4, 256], 0, 8)
    shared = describe(rows[:, :step].contiguous(), [(256 if config.geometry.whole else wgs * 64), step], 128, bits)
    codes = shared if config.geometry.whole else describe(byte, [64, 256], 0, 8)
    scales = describe(torch.zeros(512, 8), [4 * max(config.geometry.scale_groups, 1), 8], 0, 32)
    if config.geometry.whole:
        offsets = describe(torch.zeros(512, 8), [4 * max(config.geometry.routed_groups, 1), 8], 0, 32)
    tokens = []
    for n in (nt, nts):
        tokens += [describe(rows, [n, step], 128, bits), describe(wide, [1, max(n, 32)], 0, 32)] * 2
    with standing_in("cuda", "sm_90"):
        return folded_moe.warmup(
            codes,
            offsets,
            codes,
            offsets,
            shared,
            shared,
            scales,
            scales,
            *tokens,
            wide,
            wide,
            wide,
            rows,
            wide,
            wide,
            word,
            wide,
            word,
            3,
            512,
            1024,
            config.geometry.k_up,
            config.geometry.k_down4,
            config.geometry.k_down8,
            config,
            grid=(132,),
            num_warps=4,
            maxnreg=config.launch_registers,
        )


def report(kernel):
    cuobjdump = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin/cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        cubin, ptx = os.path.join(folder, "k.cubin"), os.path.join(folder, "k.ptx")
        with open(cubin, "wb") as f:
            f.write(kernel.asm["cubin"])
        with open(ptx, "w") as f:
            f.write(kernel.asm["ptx"])
        sass = subprocess.run([cuobjdump, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        said = subprocess.run(
            [get_ptxas(90).path, "-v", "-arch=sm_90a", ptx, "-o", os.devnull],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    lines = [line for line in sass.splitlines() if re.match(r"\s+/\*[0-9a-f]{4,5}\*/", line)]
    bodies = _product_loops(lines)
    return Report(
        kernel.metadata.shared,
        sum(int(n) for n in re.findall(r"(\d+) bytes spill", said)),
        sum(bool(re.search(r"\b(LDL|STL)\b", line)) for body in bodies for line in body),
        len(bodies),
        sum(any("MEMBAR" in line for line in body) for body in bodies),
        tuple(re.findall(r"C75\d\d[^\n]*", said)),
        sum("GMMA" in line for line in lines),
        sum("WARPGROUP.DEPBAR" in line for line in lines),
        _at_barriers(lines),
    )


def _at_barriers(lines):
    """Loads and stores whose offset in shared memory is an mbarrier's."""
    offset = r"[^\[]*\[(?:.*\+)?(0x[0-9a-f]+)\]"
    barriers = {int(found[1], 16) for line in lines if (found := re.search(r"SYNCS\.EXCH\.64" + offset, line))}
    assert barriers
    plain = [(line, found) for line in lines if (found := re.search(r"\b(?:LDS|STS|LDSM|STSM|ATOMS)\b" + offset, line))]
    assert plain
    return tuple(line for line, found in plain if int(found[1], 16) in barriers)


def _product_loops(lines):
    """Bodies of the innermost loops that hold a wgmma."""
    at = [int(re.search(r"/\*([0-9a-f]+)\*/", line).group(1), 16) for line in lines]
    index = {a: i for i, a in enumerate(at)}
    spans = []
    for i, line in enumerate(lines):
        jump = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", line)
        if jump and int(jump.group(1), 16) <= at[i] and int(jump.group(1), 16) in index:
            start = index[int(jump.group(1), 16)]
            if any("GMMA" in body for body in lines[start : i + 1]):
                spans.append((start, i))
    spans.sort(key=lambda s: s[1] - s[0])
    inner = []
    for a, b in spans:
        if not any(a <= y and x <= b for x, y in inner):
            inner.append((a, b))
    return [lines[a : b + 1] for a, b in inner]
