"""MoE blocks of Transformers models: what they hold, and the block that takes their place."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foldmoe.formats import Format, QuantizedTensor
from foldmoe.moe import Activation, ExpertWeights

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from foldmoe.layer import FoldedMoE

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of weights and input."""

_ROUTED = ("gate_up_proj", "down_proj")
_SHARED = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")


@dataclass(frozen=True)
class MoEBlock:
    """A stock block and its parts, whatever its class.

    Args:
        name: module path, e.g. ``model.layers.3.mlp``.
        module: the block.
        shared: its shared MLP.
        shared_gate: the linear layer whose sigmoid weighs the shared expert (Qwen), or None.
    """

    name: str
    module: nn.Module
    shared: nn.Module
    shared_gate: nn.Module | None

    @property
    def gate(self) -> nn.Module:
        return self.module.get_submodule("gate")

    @property
    def experts(self) -> nn.Module:
        return self.module.get_submodule("experts")

    @property
    def top_k(self) -> int:
        """Routed experts a token; -1 where the gate does not say."""
        return int(getattr(self.gate, "top_k", -1))

    @property
    def routed_scaling_factor(self) -> float:
        """What the block states; its gate may apply it already. 1 where it states none."""
        stated = getattr(self.module, "routed_scaling_factor", None)
        return float(stated) if isinstance(stated, int | float) else 1.0

    @property
    def hashed(self) -> bool:
        """Experts are looked up by token id: the gate wants ``input_ids``."""
        return "input_ids" in inspect.signature(self.gate.forward).parameters

    def obstacles(self) -> tuple[str, ...]:
        """Why the block cannot be swapped, as far as its parts tell; empty if it can.

        What the block does with its parts is the question of :mod:`foldmoe.integrations.transformers.twin`.
        """
        found = []
        for part, module, known in (
            ("routed experts", self.experts, _ROUTED),
            ("shared expert", self.shared, _SHARED),
        ):
            act = getattr(module, "act_fn", None)
            if not isinstance(act, nn.SiLU) and type(act).__name__ not in ("SiLU", "SiLUActivation"):
                found.append(f"{part} use {type(act).__name__}, only silu(gate) * up is known")
            names = {name for name, _ in module.named_parameters()}
            if any("bias" in name for name in names):
                found.append(f"{part} have biases")
            elif names != set(known):
                found.append(f"parameters of the {part} are {', '.join(sorted(names))}; expected {', '.join(known)}")
            dtypes = {p.dtype for p in module.parameters()} - set(DTYPES)
            if dtypes:
                found.append(f"weights of the {part} are in {_listed(dtypes)}; expected bfloat16, float16 or float32")
        limit = getattr(self.experts, "limit", None)
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            found.append(f"routed experts clamp at {limit}; expected a number above 0")
        if getattr(self.experts, "is_transposed", False):
            found.append("routed experts are stored transposed")
        if not found and not self._fits():
            shapes = ", ".join(str(list(p.shape)) for p in self.parameters())
            found.append(f"shapes {shapes} are no [E, 2I, H], [E, H, I], [S, H], [S, H], [H, S]")
        devices = {p.device for p in self.parameters()} if not found else set()
        if len(devices) > 1:
            found.append(f"its experts are spread over {_listed(devices)}")
        # Accelerate replaces forward to move inputs, which changes no numbers.
        modules = (m for m in (self.module, self.experts, self.shared) if not hasattr(m, "_hf_hook"))
        found += [f"{type(m).__name__}.forward was replaced in this model" for m in modules if "forward" in vars(m)]
        return tuple(found)

    def _places(self) -> list[tuple[nn.Module, str]]:
        """Modules and names of :meth:`parameters`."""
        shared = [(self.shared.get_submodule(name.removesuffix(".weight")), "weight") for name in _SHARED]
        return [*((self.experts, name) for name in _ROUTED), *shared]

    def parameters(self) -> list[nn.Parameter]:
        """Routed gate and up ``[E, 2I, H]``, down ``[E, H, I]``; shared gate, up ``[S, H]``, down ``[H, S]``."""
        return [module.get_parameter(name) for module, name in self._places()]

    def _fits(self) -> bool:
        gate_up, down, gate, up, shared_down = (p.shape for p in self.parameters())
        return (
            len(gate_up) == len(down) == 3
            and gate_up == (down[0], 2 * down[2], down[1])
            and gate == up == shared_down[::-1]
            and len(gate) == 2
            and gate[1] == down[1]
        )

    def activation(self) -> Activation:
        return Activation(getattr(self.experts, "limit", None))

    def weights(self) -> tuple[ExpertWeights, ExpertWeights]:
        """Routed and shared weights; routed ones are the block's own storage."""
        gate_up, down, gate, up, shared_down = (p.data for p in self.parameters())
        shared = (torch.cat((gate, up))[None], shared_down[None])
        return ExpertWeights(_plain(gate_up), _plain(down)), ExpertWeights(*map(_plain, shared))

    def release(self) -> None:
        """Drop the block's own weights, so that nothing is held twice; dtypes and ``requires_grad`` stay known."""
        for module in (self.experts, self.shared):
            module.to_empty(device="meta")

    def restore(self, routed: ExpertWeights, shared: ExpertWeights, dtype: torch.dtype | None = None) -> None:
        """Give the block back its weights, as numbers of ``dtype`` (the released ones' by default).

        Plain numbers that have that dtype already are taken as they are. ``requires_grad`` is what it was.
        """
        before = self.parameters()
        dtypes = [dtype or parameter.dtype for parameter in before]

        def numbers(tensor: QuantizedTensor, wanted: torch.dtype) -> Tensor:
            return tensor.values if tensor.values.dtype == wanted else tensor.dequantize(wanted)

        gate, up = numbers(shared.gate_up, dtypes[2])[0].chunk(2)
        routed_numbers = (numbers(routed.gate_up, dtypes[0]), numbers(routed.down, dtypes[1]))
        tensors = (*routed_numbers, gate, up, numbers(shared.down, dtypes[4])[0])
        for (module, name), stock, tensor in zip(self._places(), before, tensors, strict=True):
            wanted = stock.requires_grad and not tensor.is_inference()  # torch allows no other
            setattr(module, name, nn.Parameter(tensor, requires_grad=wanted))


def _listed(things: Iterable[object]) -> str:
    return ", ".join(sorted(str(thing).removeprefix("torch.") for thing in things))


def _plain(values: Tensor) -> QuantizedTensor:
    return QuantizedTensor(values, format=Format.BF16)


def moe_blocks(model: nn.Module) -> Iterator[MoEBlock]:
    """Every block of ``model`` with routed experts and a shared expert, by its parts, not by its class."""
    for name, module in model.named_modules():
        shared = getattr(module, "shared_experts", None) or getattr(module, "shared_expert", None)
        experts = getattr(module, "experts", None)
        if isinstance(shared, nn.Module) and hasattr(module, "gate") and hasattr(experts, "gate_up_proj"):
            yield MoEBlock(name, module, shared, getattr(module, "shared_expert_gate", None))


class FoldedBlock(nn.Module):
    """Router, then routed and shared experts in one call.

    Keeps the stock block aside, weights released, for :func:`unfold`.

    Args:
        block: the stock block.
        moe: its experts.
        routed_scale: of the routed sum, where the gate's weights leave it out.
    """

    def __init__(self, block: MoEBlock, moe: FoldedMoE, routed_scale: float = 1.0) -> None:
        super().__init__()
        self.gate = block.gate
        self.shared_expert_gate = block.shared_gate
        self.moe = moe
        self.hashed = block.hashed
        self.routed_scale = routed_scale
        # Out of reach of named_modules(): the stock block's parameters are empty and belong to no state dict.
        object.__setattr__(self, "stock", block)

    def forward(self, hidden_states: Tensor, input_ids: Tensor | None = None, **_: Any) -> Tensor:
        """``[batch, sequence, H]`` to the same shape; ``input_ids`` for layers that route by token id."""
        x = hidden_states.reshape(-1, hidden_states.shape[-1])  # some gates take rows only, none needs more
        _, weights, ids = self.gate(x, input_ids) if self.hashed else self.gate(x)
        shared_weights = None
        if self.shared_expert_gate is not None:
            shared_weights = torch.sigmoid(self.shared_expert_gate(x)).flatten().to(torch.float32)
        y: Tensor = self.moe(
            x, ids, weights.to(torch.float32), shared_weights=shared_weights, routed_scale=self.routed_scale
        )
        return y.view(hidden_states.shape)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Refuse: packed experts have no stock names, and a file without them would load with random ones.

        Raises:
            RuntimeError: always. Copies and whole-module pickles do not come here.
        """
        raise RuntimeError(
            f"{prefix.removesuffix('.') or 'the block'} is folded: its experts are in no state dict, and a checkpoint "
            "without them would load random ones; call foldmoe.integrations.transformers.unfold(model) first"
        )
