"""Parameters that take the checkpoint's expert tensors as they are, cut to this rank's part; nothing is requantised.

vLLM's own loader cuts scales where blocks end; here a block that a cut divides is refined first, which changes no value
(a width of 192 from blocks of 128 becomes blocks of 64).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foldmoe.formats import Format, QuantizedTensor, blocks, e8m0, refuse_nan
from foldmoe.moe import ExpertWeights

if TYPE_CHECKING:
    from foldmoe.integrations.vllm.stored import Storage

_BYTES = (torch.uint8, torch.int8, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2)

_DUMMY_EXPONENT, _NAN = 120, 255


@dataclass
class RawExperts:
    """This rank's routed experts before they are packed.

    Args:
        layer: name for messages.
        storage: as the checkpoint has them.
        count: experts of this rank.
        hidden: H.
        width: I of this rank.
        rank, parts: the tensor-parallel cut of the width.
        float_dtype: of bf16 experts: the model's own.
    """

    layer: str
    storage: Storage
    count: int
    hidden: int
    width: int
    rank: int
    parts: int
    float_dtype: torch.dtype
    loaded: set[tuple[str, str, int]] = field(default_factory=set)

    @property
    def _gate_up_block(self) -> blocks.Block:
        return self.storage.rows_block(self.width), self.storage.format.block[1]

    @property
    def _down_block(self) -> blocks.Block:
        return self.storage.format.block[0], self.storage.columns_block(self.width, self.parts)

    def names(self) -> list[str]:
        """Parameter names, as vLLM's loaders look for them."""
        scales = [f"w13_{self.storage.scale_name}", f"w2_{self.storage.scale_name}"] if self.storage.scale_name else []
        return ["w13_weight", "w2_weight", *scales]

    def register(self, module: nn.Module, weight_loader: Any) -> None:
        """Add the parameters to vLLM's ``RoutedExperts``; they are this layer's only storage until it is packed."""
        format, width = self.storage.format, self.width
        each = 2 if format.packed else 1
        dtype = torch.uint8 if format.packed else torch.float8_e4m3fn if format.fp8 else self.float_dtype
        shapes = {
            "w13_weight": (2 * width, self.hidden // each),
            "w2_weight": (self.hidden, width // each),
        }
        if self.storage.scale_dtype is not None:
            gate = blocks.scale_shape(width, self.hidden, self._gate_up_block)
            shapes[f"w13_{self.storage.scale_name}"] = (2 * gate[0], gate[1])
            shapes[f"w2_{self.storage.scale_name}"] = blocks.scale_shape(self.hidden, width, self._down_block)
        for name, shape in shapes.items():
            scale = "scale" in name
            # Zeros for codes as in vLLM's own layers: with dummy weights nobody writes them, in no arm of a comparison.
            new = torch.zeros if format.packed and not scale else torch.empty
            values = new(self.count, *shape, dtype=self.storage.scale_dtype if scale else dtype)
            parameter = nn.Parameter(values, requires_grad=False)
            parameter.weight_loader = weight_loader  # type: ignore[attr-defined]
            if scale:
                parameter.quant_method = "block"  # type: ignore[attr-defined]  # what vLLM's own loaders ask for
            module.register_parameter(name, parameter)

    def load(self, parameter: Tensor, tensor: Tensor, name: str, shard: str, expert: int) -> None:
        """Copy one tensor of one expert.

        Args:
            parameter: the one that ``name`` ends with.
            tensor: the whole expert's, as stored.
            name: the parameter's full name.
            shard: "w1" (gate), "w3" (up) or "w2" (down).
            expert: this rank's number of it.

        Raises:
            ValueError: a shape or dtype that is not the stored format's, or an unknown shard.
        """
        if shard not in ("w1", "w2", "w3"):
            raise ValueError(f"{self.layer}: unknown part {shard!r} of an expert; expected w1, w2 or w3")
        scale = "scale" in name.rsplit(".", 1)[-1]
        part = self._cut(tensor, shard, scale, name)
        target = parameter.data[expert]
        if shard != "w2":
            half = target.shape[0] // 2
            target = target.narrow(0, 0 if shard == "w1" else half, half)
        if target.shape != part.shape:
            raise ValueError(
                f"{self.layer}: {name} ({shard}) of expert {expert}: this rank's part of the checkpoint's "
                f"{list(tensor.shape)} is {list(part.shape)}, expected {list(target.shape)}"
            )
        self._copy(target, part, name)
        self.loaded.add((name.rsplit(".", 1)[-1], shard, expert))

    def _cut(self, tensor: Tensor, shard: str, scale: bool, name: str) -> Tensor:
        format, dim = self.storage.format, 0 if shard != "w2" else 1
        rows, columns = (self.width * self.parts, self.hidden) if dim == 0 else (self.hidden, self.width * self.parts)
        each = 2 if format.packed else 1
        wanted = blocks.scale_shape(rows, columns, format.block) if scale else (rows, columns // each)
        if tuple(tensor.shape) != wanted:
            raise ValueError(
                f"{self.layer}: {name} ({shard}) has shape {list(tensor.shape)} in the checkpoint, expected "
                f"{list(wanted)} for {format.value} experts of {self.width * self.parts} x {self.hidden}"
            )
        if not scale:
            step = each if dim == 1 else 1
            return tensor.narrow(dim, self.rank * self.width // step, self.width // step)
        block = self._gate_up_block if dim == 0 else self._down_block
        tensor = blocks.regrid(tensor, rows, columns, format.block, block)
        count = -(-self.width // block[dim])
        return tensor.narrow(dim, self.rank * count, count)

    def _copy(self, target: Tensor, part: Tensor, name: str) -> None:
        """Bytes stay bytes; a scale's two spellings are converted where that is exact."""
        if target.dtype == part.dtype:
            target.copy_(part)
        elif target.dtype in _BYTES and part.dtype in _BYTES:
            target.view(torch.uint8).copy_(part.view(torch.uint8))
        elif target.dtype == torch.float32 and part.dtype == torch.float8_e8m0fnu:
            target.copy_(e8m0.decode(part, torch.float32))
        elif target.dtype.is_floating_point and part.dtype.is_floating_point and self.storage.format is Format.BF16:
            target.copy_(part)
        else:
            raise ValueError(f"{self.layer}: {name} is {part.dtype} in the checkpoint, expected {target.dtype}")

    @property
    def dummy(self) -> bool:
        """No tensor came: ``--load-format dummy``."""
        return not self.loaded

    def missing(self) -> list[str]:
        """Tensors that never came, of which there are none where none was to come."""
        if self.dummy:
            return []
        wanted = (
            (name, shard, expert)
            for name in self.names()
            for shard in (("w2",) if name.startswith("w2") else ("w1", "w3"))
            for expert in range(self.count)
        )
        return [f"expert {e}: {name} ({shard})" for name, shard, e in wanted if (name, shard, e) not in self.loaded]

    def take(self, module: nn.Module) -> ExpertWeights:
        """The loaded weights; the module no longer holds them.

        Raises:
            ValueError: tensors that the checkpoint did not have, or a NaN in one.
        """
        if missing := self.missing():
            listed = "\n  ".join(missing[:10])
            raise ValueError(f"{self.layer}: {len(missing)} expert tensors are missing in the checkpoint:\n  {listed}")
        held = {name: module._parameters.pop(name) for name in self.names()}
        parts = []
        for part, block in (("w13", self._gate_up_block), ("w2", self._down_block)):
            scales = held.get(f"{part}_{self.storage.scale_name}")
            values = held[f"{part}_weight"]
            assert values is not None
            if self.dummy and scales is not None:
                set_dummy_scales(scales.data)
            tensor = QuantizedTensor(
                values.data, None if scales is None else scales.data, format=self.storage.format, block=block
            )
            if not self.dummy:
                refuse_nan(tensor, f"{self.layer}.{part}_weight", f"{self.layer}.{part}_{self.storage.scale_name}")
            parts.append(tensor)
        return ExpertWeights(*parts)


def set_dummy_scales(scales: Tensor) -> None:
    """2^-7 wherever vLLM's dummy weights left no number; numbers stay, so that stock layers compute with the same ones.

    It writes floating-point parameters alone: what stands in an integer one is chance.
    """
    if scales.element_size() > 1:
        scales.masked_fill_(~scales.isfinite(), 2.0 ** (_DUMMY_EXPONENT - 127))
    elif scales.dtype == torch.float8_e8m0fnu:
        found = scales.view(torch.uint8)
        found.masked_fill_(found == _NAN, _DUMMY_EXPONENT)
    else:
        scales.fill_(_DUMMY_EXPONENT)
