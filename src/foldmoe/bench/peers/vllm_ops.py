"""vLLM's compiled MoE operators, loaded without importing vLLM (whose import needs its own torch)."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

PACKAGE = "vllm==0.33.0"
_LIBRARY = "_moe_C_stable_libtorch.abi3.so"


def _path() -> Path | None:
    found = find_spec("vllm")
    folders = (found.submodule_search_locations or []) if found else []
    return next((path for folder in folders if (path := Path(folder) / _LIBRARY).is_file()), None)


def missing() -> str | None:
    """Why the operators cannot be loaded, or None."""
    if _path() is None:
        return f"vllm's {_LIBRARY} is not there: pip install --no-deps {PACKAGE}"
    return None


@cache
def load() -> None:
    """Register ``torch.ops._moe_C``.

    Raises:
        ImportError: if the library is missing or does not fit this torch.
    """
    path = _path()
    if path is None:
        raise ImportError(missing())
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ImportError(f"{path} does not load with torch {torch.__version__}: {error}") from error


def align(topk_ids: Tensor, block: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Routes sorted by expert, every expert's padded to whole blocks of ``block`` routes.

    Args:
        topk_ids: ``[M, K]`` int32.

    Returns:
        int32 routes (token * K + k; M * K where padded), int32 expert of each block, int32 ``[1]`` routes with padding.
    """
    routes = topk_ids.numel()
    capacity = min(routes + experts * (block - 1), routes * block)
    order = topk_ids.new_empty(capacity)
    experts_of_blocks = topk_ids.new_empty(-(-capacity // block))
    padded = topk_ids.new_empty(1)
    torch.ops._moe_C.moe_align_block_size(topk_ids, experts, block, order, experts_of_blocks, padded, None)
    return order, experts_of_blocks, padded
