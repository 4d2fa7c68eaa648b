"""What the user asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Fold = Literal["auto", "native", "slot", "dual", "off", "stock"]
ActivationChoice = Literal["checkpoint", "bf16", "fp8", "fp8_token"]


@dataclass(frozen=True)
class FusionPolicy:
    """How layers should be folded, as far as they can be.

    Args:
        fold: ``auto`` takes the best strategy that keeps the stored precision, and runs two streams at the batch sizes
            where the backend measured them faster; ``native`` and ``slot`` ask for one, at every batch size (a layer
            that cannot is left serial, with the reason); ``dual`` runs the shared expert on a second stream,
            ``off`` after the routed experts, both with our own kernels; ``stock`` leaves the engine's layer alone.
        allow_requantize: the slot fold may lower an FP8 or BF16 shared expert to the routed experts' format.
        activations: precision of x and act(.); ``checkpoint`` follows the checkpoint's own declaration.
        backend: ``auto`` takes the fastest that supports the layer, or the name of one.

    Raises:
        ValueError: for an unknown choice.
    """

    fold: Fold = "auto"
    allow_requantize: bool = False
    activations: ActivationChoice = "checkpoint"
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name, found, allowed in (
            ("fold", self.fold, get_args(Fold)),
            ("activations", self.activations, get_args(ActivationChoice)),
        ):
            if found not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}; found {found!r}")
        if not isinstance(self.allow_requantize, bool):
            raise ValueError(f"allow_requantize must be True or False; found {self.allow_requantize!r}")
