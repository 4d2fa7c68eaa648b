"""vLLM's shared MLP, whatever model it belongs to, as weights of ours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn

from foldmoe.formats import Format, QuantizedTensor
from foldmoe.integrations.vllm.raw import set_dummy_scales
from foldmoe.integrations.vllm.stored import FP8_BLOCKS
from foldmoe.moe import Activation, ExpertSpec, ExpertWeights

_SCALES = ("weight_scale_inv", "weight_scale")
"""Of block FP8, and of MXFP8, by which vLLM reads DeepSeek-V4.1's blocks of 32x32: their rows repeated, as bytes."""

SERVES_TWO = {"Ernie4_5_VLMoeMLP": "text and vision experts"}
"""Shared experts that vLLM builds once for two sets of routed experts, by their class."""


@dataclass(frozen=True)
class SharedMLP:
    """The parts of a shared MLP: two linear layers, an activation, and maybe a gate.

    Args:
        gate_up: merged projection, ``[2I, H]``, rows gate then up.
        down: ``[H, I]``.
        activation: silu(gate) * up, clamped or not.
        expert_gate: its sigmoid weighs the shared expert (Qwen); None for weight 1.
        format: of both.
    """

    gate_up: nn.Module
    down: nn.Module
    activation: Activation
    expert_gate: nn.Module | None
    format: Format

    @classmethod
    def of(cls, module: nn.Module) -> SharedMLP | str:
        """Read a module's parts, or say why it is none that folds."""
        gate_up, down = getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None)
        kind = type(module).__name__
        if kind in SERVES_TWO:
            return f"one shared expert ({kind}) serves two sets of routed experts: {SERVES_TWO[kind]}"
        if not isinstance(gate_up, nn.Module) or not isinstance(down, nn.Module):
            return f"the shared expert ({kind}) has no gate_up_proj and down_proj"
        if any("bias" in name for name, _ in module.named_parameters()):
            return f"the shared expert ({kind}) has biases"
        activation = _activation(getattr(module, "act_fn", None))
        if isinstance(activation, str):
            return activation
        found, other = _format(gate_up), _format(down)
        if isinstance(found, str) or found is not other:
            return f"the shared expert is stored in a way that is not known here ({found}, {other})"
        if getattr(down, "reduce_results", False) and getattr(down, "tp_size", 1) > 1:
            return "the shared expert sums over its ranks by itself"
        return cls(gate_up, down, activation, getattr(module, "expert_gate", None), found)

    @property
    def width(self) -> int:
        """I of this rank, zero tails included."""
        return _weight(self.down).shape[1]

    def spec(self) -> ExpertSpec:
        """For the plan; tensors need not be loaded yet."""
        scales = _scales(self.down)
        block = self.format.block
        if scales is not None and self.width % block[0]:
            block = gcd(block[0], self.width), block[1]
        plain = (_weight(self.down) if scales is None else scales).element_size()
        return ExpertSpec(
            1,
            self.width,
            self.format,
            block,
            e8m0_scales=plain == 1,
            float_bytes=plain if plain > 1 else 0,
            float16=_weight(self.down).dtype == torch.float16,
        )

    def claim(self, replacement: Any) -> None:
        """Take the linear layers away from vLLM's own processing, which would repack them.

        Raises:
            RuntimeError: another layer has them already.
        """
        for linear in (self.gate_up, self.down):
            if isinstance(earlier := getattr(linear, "quant_method", None), type(replacement)):
                raise RuntimeError(
                    f"{replacement.entry.name}: its shared expert is {earlier.entry.name}'s too, and was "
                    "folded there; FOLDMOE_FOLD=stock leaves the model to vLLM. Please report which model this is"
                )
            linear.quant_method = replacement

    def take(self, dummy: bool = False) -> ExpertWeights:
        """The loaded weights ``[1, ...]``; vLLM's module no longer holds them.

        Args:
            dummy: no checkpoint was read (``--load-format dummy``).
        """
        (values, scales), (down_values, down_scales) = (self._pop(linear) for linear in (self.gate_up, self.down))
        for found in (scales, down_scales):
            if dummy and found is not None:
                set_dummy_scales(found)
        if scales is not None and down_scales is not None and scales.shape[1] == values.shape[1]:
            return ExpertWeights(self._once(values, scales), self._once(down_values, down_scales))
        down = QuantizedTensor(down_values, down_scales, format=self.format)
        width = down.shape[-1]
        if scales is None or width % self.format.block[0] == 0:
            return ExpertWeights(QuantizedTensor(values, scales, format=self.format), down)
        # Each half has scales of its own, the last block of each cut short: no block reaches over the boundary.
        halves = zip(values.chunk(2, dim=1), scales.chunk(2, dim=1), strict=True)
        gate, up = (QuantizedTensor(*half, format=self.format) for half in halves)
        return ExpertWeights.from_parts(gate, up, down)

    def _once(self, weight: Tensor, repeated: Tensor) -> QuantizedTensor:
        """Weights with one scale a block, of scales ``[1, rows, columns / block]`` as bytes, each block's in every row.

        Sizes are multiples of the block: vLLM's MXFP8 layers take no other.
        """
        found = repeated[:, :: self.format.block[0]].contiguous().view(torch.float8_e8m0fnu)
        return QuantizedTensor(weight, found, format=self.format)

    @staticmethod
    def _pop(linear: nn.Module) -> tuple[Tensor, Tensor | None]:
        weight, scales = linear._parameters.pop("weight"), _scales(linear)
        for name in _SCALES:
            linear._parameters.pop(name, None)
        assert weight is not None
        return weight.data[None], None if scales is None else scales.data[None]


def zero_tail(shared: ExpertWeights) -> int:
    """Columns of the width, counted from the end in whole blocks, whose gate, up and down are all zero.

    vLLM rounds a rank's part of a block-FP8 shared expert up to whole blocks and gives the last ranks zeros: 24 blocks
    over 16 ranks are 2 on each of the first 12 and none on the others. act(0, 0) = 0, so they add nothing.

    Args:
        shared: ``[1, ...]``. 0 if it is not stored in whole FP8 blocks.
    """
    rows = shared.format.block[0]
    count, rest = divmod(shared.width, rows)
    if not shared.format.fp8 or rest:
        return 0
    gate, up = (half.values.view(torch.uint8).unflatten(1, (count, -1)) for half in shared.gate_and_up())
    down = shared.down.values.view(torch.uint8).unflatten(2, (count, -1))
    used = (gate != 0).any((0, 2, 3)) | (up != 0).any((0, 2, 3)) | (down != 0).any((0, 1, 3))
    kept = int(used.nonzero().max()) + 1 if used.any() else 0
    return (count - kept) * rows


def without_zero_tail(shared: ExpertWeights) -> ExpertWeights:
    """The same expert without its :func:`zero_tail`; as it is where there is none.

    One block is kept where all are zero, since a layer has a shared expert on every rank or on none.
    """
    tail = min(zero_tail(shared), shared.width - shared.format.block[0])
    if tail <= 0:
        return shared
    narrow = shared.unpadded(shared.width - tail)
    assert narrow.down.scales is not None
    # Copies: a view would hold on to the zeros.
    down_part = replace(narrow.down, values=narrow.down.values.contiguous(), scales=narrow.down.scales.contiguous())
    return ExpertWeights(narrow.gate_up, down_part)


def _weight(linear: nn.Module) -> Tensor:
    weight = linear._parameters["weight"]
    assert weight is not None
    return weight


def _activation(act: Any) -> Activation | str:
    """silu(gate) * up, clamped or not, by what vLLM's activation layer states."""
    kind = type(act).__name__
    if kind == "SiluAndMul":
        return Activation()
    if kind == "SiluAndMulWithClamp" and getattr(act, "alpha", 1.0) == 1.0 and getattr(act, "beta", 0.0) == 0.0:
        return Activation(float(act.swiglu_limit))
    return f"the shared expert's activation is {kind}; only silu(gate) * up is known here"


def _scales(linear: nn.Module) -> Tensor | None:
    return next((found for name in _SCALES if (found := linear._parameters.get(name)) is not None), None)


def _format(linear: nn.Module) -> Format | str:
    weight, scales = linear._parameters.get("weight"), _scales(linear)
    method = getattr(linear, "quant_method", None)
    if weight is None:
        return type(method).__name__
    if weight.dtype in (torch.bfloat16, torch.float16, torch.float32) and scales is None:
        return Format.BF16
    block = getattr(linear, "weight_block_size", None)
    if scales is not None and scales.shape[0] == weight.shape[0] and scales.element_size() == 1:
        block = getattr(getattr(method, "ctx", None), "scale_block_size", None)  # in the checkpoint
    if weight.dtype == torch.float8_e4m3fn and scales is not None and block is not None:
        return FP8_BLOCKS.get(tuple(block), f"FP8 blocks of {block}")
    return f"{str(weight.dtype).removeprefix('torch.')} by {type(method).__name__}"
