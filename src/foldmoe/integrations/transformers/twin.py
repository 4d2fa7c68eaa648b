"""Does a folded block compute what the stock block computes? Asked before any weight moves.

A block may do more than its parts show: norm the result, clamp after the activation, scale the routed sum (which some
gates do already). So the stock class runs beside the folded block on a few rows, and the two must agree, with the
factor that the block states if not without. Not the block itself runs but its twin: the same classes and attributes,
experts four columns wide, random float32 weights on the CPU. That needs no weights (a model that is still to be loaded
has none), asks for little memory (``E * 48 H`` bytes for E routed experts of hidden size H, while it runs) and compares
formulas only: no rounding, no quantised activation and no kernel blurs the answer.
What kernels compute is the question of :func:`foldmoe.verify.verify`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foldmoe.integrations.transformers.blocks import FoldedBlock, MoEBlock
from foldmoe.layer import FoldedMoE
from foldmoe.planner import FusionPolicy
from foldmoe.reference import relative_error

if TYPE_CHECKING:
    from collections.abc import Hashable

    from foldmoe.moe import Activation, LayerSpec

TOLERANCE = 1e-4
"""Per row, both in float32: sums in another order give up to 6e-6, a clamp or factor left out 1e-2 and more."""

_WIDTH = 4
_SCALES = (1.0, 8.0, 64.0, 512.0)
"""Of the rows: gate and up then spread that far, so that any clamp in use (7 to 16) is reached."""

_SMALL = 1 / 64
"""Of all weights but the experts': the router's logits stay below 16, where no score underflows to 0 / 0."""

_ROWS = 4
"""Of each scale."""


class Twins:
    """What was found, by everything about a block that its weights do not say: layers of a model are mostly alike."""

    def __init__(self) -> None:
        self._known: dict[Hashable, float | str] = {}

    def routed_scale(self, block: MoEBlock, spec: LayerSpec) -> float | str:
        """The factor of the routed sum with which a folded block computes what ``block`` does; or why none does.

        Args:
            block: one without obstacles; its weights are not read and may be anywhere.
            spec: the activations that the folded block would have, and its top-k.
        """
        key = _key(block, spec)
        if key not in self._known:
            with torch.device("cpu"):
                self._known[key] = _routed_scale(block, spec)
        return self._known[key]


def _routed_scale(block: MoEBlock, spec: LayerSpec) -> float | str:
    """The factor with which the twins agree, or why they disagree."""
    random = torch.Generator().manual_seed(0)
    twin = _twin(block, random)
    rows = torch.tensor(_SCALES).repeat_interleave(_ROWS)
    x = torch.randn(len(rows), spec.hidden, generator=random, dtype=torch.float32) * rows[:, None]
    ids = torch.arange(len(rows)) % 4  # token ids that any vocabulary has
    asked = inspect.signature(twin.module.forward).parameters
    options = {"input_ids": ids[None]} if "input_ids" in asked else {}
    kind = type(block.module).__name__
    with torch.inference_mode():
        try:
            stock = twin.module(x[None].clone(), **options)
        except Exception as error:
            return f"{kind} cannot be compared with a folded block: {_line(error)}"
        if not isinstance(stock, Tensor) or stock.shape != (1, *x.shape):
            return f"{kind} returns {type(stock).__name__}, where a folded block returns one tensor like its input"
        differences = []
        for scale in dict.fromkeys((1.0, block.routed_scaling_factor)):
            try:
                folded = _folded(twin, spec, scale)(x[None].clone(), **options)
            except Exception as error:
                return f"{kind} runs, folded it does not: {_line(error)}"
            differences.append(_difference(folded[0], stock[0]))
            if differences[-1] <= TOLERANCE:
                return scale
    least = min(differences)
    return f"{kind} does more than gate, routed experts and shared expert: folded, a row differs by {least:.1e}"


def _difference(y: Tensor, expected: Tensor) -> float:
    """Of the row that differs most, of those that are finite where expected."""
    finite = expected.isfinite().all(-1)
    pairs = zip(y[finite], expected[finite], strict=True)
    return max((relative_error(row, row0) for row, row0 in pairs), default=float("nan"))


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _folded(twin: MoEBlock, spec: LayerSpec, routed_scale: float) -> FoldedBlock:
    moe = FoldedMoE(
        *twin.weights(),
        activation=spec.activation,
        shared_activation=spec.shared_activation,
        policy=FusionPolicy("native", backend="torch"),
        name=twin.name,
        top_k=spec.top_k,
    )
    return FoldedBlock(twin, moe, routed_scale)


def _key(block: MoEBlock, spec: LayerSpec) -> Hashable:
    parts = []
    for name, module in block.module.named_modules():
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in tensors)
        parts.append((name, type(module), shapes, tuple(_attributes(module))))
    activations: tuple[Activation, Activation] = (spec.activation, spec.shared_activation)
    return (*parts, *activations, spec.hidden, spec.top_k)


def _attributes(module: nn.Module) -> list[tuple[str, object]]:
    """Public attributes: plain ones by value, a config or a list by what it is here."""
    plain = (bool, int, float, str, type(None))
    public = ((name, value) for name, value in sorted(vars(module).items()) if not name.startswith("_"))
    return [(name, value if isinstance(value, plain) else id(value)) for name, value in public]


def _twin(block: MoEBlock, random: torch.Generator) -> MoEBlock:
    """The block with narrow experts and random weights."""
    experts, width, hidden = len(block.parameters()[0]), _WIDTH, block.parameters()[0].shape[-1]
    routed = ((experts, 2 * width, hidden), (experts, hidden, width))
    narrow = (*routed, (width, hidden), (width, hidden), (hidden, width))
    shapes = {id(weight): shape for weight, shape in zip(block.parameters(), narrow, strict=True)}
    made: dict[int, nn.Module] = {}

    def random_like(parameter: nn.Parameter) -> nn.Parameter:
        shape = shapes.get(id(parameter), tuple(parameter.shape))
        scale = (1.0 if id(parameter) in shapes else _SMALL) / max((1, *shape[-1:])) ** 0.5
        values = torch.randn(shape, generator=random, dtype=torch.float32).mul_(scale)
        return nn.Parameter(values, requires_grad=False)

    def clone(module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        copy = made[id(module)] = module.__class__.__new__(module.__class__)
        nn.Module.__init__(copy)  # hooks stay behind, and so does what is bound to the block itself
        taken = {"forward", "_compiled_call_impl", *vars(copy)}
        vars(copy).update({name: _eager(value) for name, value in vars(module).items() if name not in taken})
        for name, parameter in module._parameters.items():
            copy.register_parameter(name, None if parameter is None else random_like(parameter))
        for name, buffer in module._buffers.items():
            copy.register_buffer(name, None if buffer is None else _values(buffer))
        for name, child in module._modules.items():
            copy.add_module(name, None if child is None else clone(child))
        return copy.eval()

    module = clone(block.module)
    gate = None if block.shared_gate is None else clone(block.shared_gate)
    return MoEBlock(block.name, module, clone(block.shared), gate)


def _values(buffer: Tensor) -> Tensor:
    """A buffer's own numbers, since they may be indices; zeros where they are still to come."""
    dtype = torch.float32 if buffer.is_floating_point() else buffer.dtype
    if buffer.device.type == "meta":
        return torch.zeros(buffer.shape, dtype=dtype)
    return buffer.detach().to("cpu", dtype, copy=True)


def _eager(value: Any) -> Any:
    """A config that asks for the experts class's own forward: the registered ones may want a GPU or wider experts."""
    return _Eager(value) if hasattr(value, "_experts_implementation") else value


class _Eager:
    _experts_implementation = "eager"

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)
