"""Kernels of expert parallelism compiled for GPUs that are not here."""

from __future__ import annotations

from importlib import import_module
from typing import Any

Target = tuple[str, "int | str", int]
HOPPER: Target = ("cuda", 90, 32)
CDNA: Target = ("hip", "gfx942", 64)

TILES: dict[str, dict[str, Any]] = {
    "fp8": {"GROUP": 128, "GROUPS": 64, "COLUMNS": 128},
    "bf16": {"GROUP": 0, "GROUPS": 1, "COLUMNS": 8192},
}
POINTERS = {
    **dict.fromkeys(("peers", "ends", "state", "alarm", "strays", "counts"), "*i64"),
    **dict.fromkeys(("weights", "gates", "gate"), "*fp32"),
    **dict.fromkeys(("x", "y", "results", "own", "parts"), "*bf16"),
    **dict.fromkeys(("message", "kept", "sent", "arrived"), "*u8"),
    **dict.fromkeys(("ids", "places"), "*i32"),
}


def placing() -> dict[str, Any]:
    """Constants of what the local launch reads."""
    import triton.language as tl

    return {"WIRE": tl.bfloat16, "SLOT": 1, "GATED": True}


def compiled(module: str, name: str, constants: dict[str, Any], target: Target) -> str:
    """Assembly, as the launcher's sizes would have it: strides and sizes are multiples of 16."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(import_module(f"foldmoe.parallel.{module}"), name)
    names = [parameter.name for parameter in kernel.params]
    signature = {one: "constexpr" if one in constants else POINTERS.get(one, "i32") for one in names}
    signature |= {one: "i64" for one in ("limit",) if one in names}
    aligned = [one for one in names if one in (*POINTERS, "x_stride", "hidden", "half", "row_bytes")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(one),): value for one, value in constants.items()},
        attrs={(names.index(one),): [["tt.divisibility", 16]] for one in aligned},
    )
    built = triton.compile(source, target=GPUTarget(*target), options={"num_warps": 8})
    return str(built.asm["ptx" if target[0] == "cuda" else "amdgcn"])
